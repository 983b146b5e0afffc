"""Pure functions that decide which jobs to submit and to cancel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dstrial.master.backends.backend import ResourceRequest, RunRef
from dstrial.master.backends.engine import EngineJob, JobState
from dstrial.master.backends.queued.jobs import (
    Plan,
    TrackedJob,
    chosen_counts,
    free_indices,
    key_text,
    plan,
    size_of,
    submitted_text,
)

_TITLE = "trial 7 of experiment 2 (gpt)"


_RUN = RunRef("2.x.1", Path("/allocations/2.x.1"), ())


def _request(num_slots: int, *, is_on_one_node: bool = False) -> ResourceRequest:
    return ResourceRequest(7, num_slots, is_on_one_node, frozenset(), lambda: (_TITLE, {}))


def job(id_: str, key: str, state: JobState, num_slots: int = 1, **values: Any) -> TrackedJob:
    """Return a tracked job that was submitted for ``num_slots`` slots."""
    return TrackedJob(EngineJob(id_, key, state, ""), f"job {id_}", size_of(_request(num_slots)), **values)


def planned(requested: str, due: str, jobs: list[TrackedJob], max_pending: int = 8) -> Plan:
    return plan({key: _request(1) for key in requested}, list(due), jobs, max_pending)


def cancelled(made: Plan) -> list[tuple[str, str]]:
    return [(one.seen.id, why) for one, why in made.cancelled]


_USED = {"run": _RUN, "was_used": True}
_CASES = {
    "each request gets a job, the most urgent first": ("ba", [], 8, [], "ba", ""),
    "a pending job is enough": ("ba", [job("1", "b", "pending")], 8, [], "a", ""),
    "a running job is enough": ("ba", [job("1", "b", "running")], 8, [], "a", ""),
    "requests beyond max_pending are deferred": ("abc", [], 2, [], "ab", "c"),
    "jobs in use are not pending": (
        "abc", [job("1", "a", "pending"), job("2", "d", "running", **_USED)], 2, [], "b", "c",
    ),
    "an unwanted job is cancelled unless in use": (
        "", [job("1", "a", "pending"), job("2", "b", "running", **_USED)], 8,
        [("1", "its allocation is no longer requested")], "", "",
    ),
    "a leaving job in use is left alone": ("", [job("1", "a", "leaving", **_USED)], 8, [], "", ""),
    "a leaving job is replaced": ("a", [job("1", "a", "leaving")], 8, [("1", "it is losing its nodes")], "a", ""),
    "a used job is replaced": (
        "a", [job("1", "a", "running", was_used=True)], 8, [("1", "its allocation has ended")], "a", "",
    ),
    "a job of another size is replaced": (
        "a", [job("1", "a", "pending", 2)], 8, [("1", "another size is requested")], "a", "",
    ),
    "a duplicate job is cancelled": (
        "a", [job("1", "a", "pending"), job("2", "a", "running")], 8,
        [("1", "there is another job for the same allocation")], "", "",
    ),
    "a cancellation that had no effect is repeated": (
        "", [job("1", "a", "running", is_cancelled=True)], 8, [("1", "its allocation is no longer requested")], "", "",
    ),
    "a cancelled job that leaves is left alone": ("", [job("1", "a", "leaving", is_cancelled=True)], 8, [], "", ""),
}  # fmt: skip


@pytest.mark.parametrize("case", _CASES)
def test_plan_cancels_and_submits(case: str) -> None:
    requested, jobs, max_pending, expected, submitted, deferred = _CASES[case]

    made = planned(requested, requested, jobs, max_pending)

    assert cancelled(made) == expected
    assert ("".join(made.submitted), "".join(made.deferred)) == (submitted, deferred)


_JOBS = st.lists(
    st.builds(
        job,
        st.uuids().map(str),
        st.sampled_from("abcd"),
        st.sampled_from(("pending", "running", "leaving")),
        st.sampled_from((1, 2)),
        run=st.sampled_from((None, _RUN)),
        was_used=st.booleans(),
        is_cancelled=st.booleans(),
    ),
    max_size=8,
)


@given(st.lists(st.sampled_from("abcd"), unique=True), st.sets(st.sampled_from("abcd")), _JOBS)
def test_plan_keeps_used_jobs_and_avoids_duplicates(
    due: list[str], rejected: set[str], jobs: list[TrackedJob]
) -> None:
    made = planned("".join({*due, *rejected}), "".join(due), jobs, 3)
    ended = {id_ for id_, _ in cancelled(made)}
    left = [one for one in jobs if one.seen.id not in ended and one.run is None and not one.is_cancelled]
    assert not any(one.seen.id in ended for one in jobs if one.run is not None)
    assert {*made.submitted, *made.deferred} <= set(due)
    keys = [*made.submitted, *made.deferred, *(one.seen.key for one in left)]
    assert len(keys) == len(set(keys))
    assert not made.submitted or len(made.submitted) + sum(one.state == "pending" for one in left) <= 3


def test_chosen_counts_split_only_if_no_node_fits() -> None:
    assert chosen_counts(2, {0: 1, 1: 2}) == {1: 2}
    assert chosen_counts(3, {0: 1, 1: 2}) == {0: 1, 1: 2}
    assert chosen_counts(2, {0: 1, 2: 4}, is_on_one_node=True) == {2: 2}
    assert chosen_counts(2, {0: 1, 1: 1}, is_on_one_node=True) is None
    assert chosen_counts(4, {0: 1, 1: 2}) is None


def test_free_indices_skip_slots_of_other_jobs() -> None:
    assert free_indices(2, {0, 2}) == [1, 3]
    assert key_text(7) == "trial-7"
    assert key_text("ab-cd") == "command-ab-cd"


def test_submitted_text_names_job_size_and_trial() -> None:
    assert submitted_text("job 12", "Slurm", 4, _request(4), _TITLE) == (
        "job 12: pending (Slurm is asked for 4 slots for trial 7 of experiment 2 (gpt))"
    )
    on_one = _request(1, is_on_one_node=True)
    assert submitted_text("placement group 1a2b3c4d", "Ray", 1, on_one, _TITLE) == (
        "placement group 1a2b3c4d: pending (Ray is asked for 1 slot on one node for trial 7 of experiment 2 (gpt))"
    )
    assert submitted_text("job 12", "Slurm", 2, _request(4), _TITLE).endswith(
        "is asked for 2 slots for trial 7 of experiment 2 (gpt), for 4 are more than there are)"
    )
