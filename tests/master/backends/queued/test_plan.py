"""Which jobs are cancelled and submitted, for any jobs and requests; pure."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dstrial.master.backends.backend import ResourceRequest
from dstrial.master.backends.queued.backend import submitted_text
from dstrial.master.backends.queued.plan import KnownJob, Plan, chosen_counts, free_indices, key_text, plan

_TITLE = "trial 7 of experiment 2 (gpt)"


def test_plan_requests_get_one_job_each_most_urgent_first() -> None:
    assert plan(["b", "a"], ["b", "a"], [], 8) == Plan((), ("b", "a"))
    assert plan(["b", "a"], ["b", "a"], [KnownJob("1", "b", "pending")], 8) == Plan((), ("a",))
    assert plan(["b", "a"], ["b", "a"], [KnownJob("1", "b", "running")], 8).submitted == ("a",)


def test_plan_requests_beyond_max_pending_are_deferred() -> None:
    assert plan("abc", ["a", "b", "c"], [], 2).submitted == ("a", "b")
    jobs = [KnownJob("1", "a", "pending"), KnownJob("2", "d", "running", is_in_use=True)]
    made = plan("abc", ["a", "b", "c"], jobs, 2)
    assert (made.submitted, made.deferred) == (("b",), ("c",))


def test_plan_unwanted_job_is_cancelled_unless_in_use() -> None:
    jobs = [KnownJob("1", "a", "pending"), KnownJob("2", "b", "running", is_in_use=True)]
    assert plan([], [], jobs, 8) == Plan((("1", "its allocation is not wanted any more"),), ())


def test_plan_leaving_job_is_replaced_once_unused() -> None:
    assert plan([], [], [KnownJob("1", "a", "leaving", is_in_use=True)], 8) == Plan((), ())
    left = plan(["a"], ["a"], [KnownJob("1", "a", "leaving")], 8)
    assert left == Plan((("1", "its nodes are taken away"),), ("a",))


def test_plan_unusable_job_is_replaced_and_a_duplicate_cancelled() -> None:
    unusable = plan(["a"], ["a"], [KnownJob("1", "a", "running", unusable_reason="host2 is gone")], 8)
    assert unusable == Plan((("1", "host2 is gone"),), ("a",))
    twice = [KnownJob("1", "a", "pending"), KnownJob("2", "a", "running")]
    assert plan(["a"], ["a"], twice, 8) == Plan((("1", "there is another job for the same allocation"),), ())


_JOBS = st.lists(
    st.builds(
        KnownJob,
        st.uuids().map(str),
        st.sampled_from("abcd"),
        st.sampled_from(("pending", "running", "leaving")),
        st.booleans(),
        st.sampled_from((None, "down")),
    ),
    max_size=8,
)


@given(st.lists(st.sampled_from("abcd"), unique=True), st.sets(st.sampled_from("abcd")), _JOBS)
def test_plan_never_cancels_used_jobs_nor_duplicates(
    due: list[str], rejected: set[str], jobs: list[KnownJob]
) -> None:
    made = plan({*due, *rejected}, due, jobs, 3)
    cancelled = {job_id for job_id, _ in made.cancelled}
    left = [job for job in jobs if job.id not in cancelled and not job.is_in_use]
    assert not any(job.id in cancelled for job in jobs if job.is_in_use)
    assert {*made.submitted, *made.deferred} <= set(due)
    keys = [*made.submitted, *made.deferred, *(job.key for job in left)]
    assert len(keys) == len(set(keys))
    assert not made.submitted or len(made.submitted) + sum(job.state == "pending" for job in left) <= 3


def test_chosen_counts_divide_only_what_fits_nowhere() -> None:
    assert chosen_counts(2, {0: 1, 1: 2}) == {1: 2}
    assert chosen_counts(3, {0: 1, 1: 2}) == {0: 1, 1: 2}
    assert chosen_counts(2, {0: 1, 2: 4}, is_on_one_node=True) == {2: 2}
    assert chosen_counts(2, {0: 1, 1: 1}, is_on_one_node=True) is None
    assert chosen_counts(4, {0: 1, 1: 2}) is None


def test_free_indices_skip_slots_of_other_jobs() -> None:
    assert free_indices(2, {0, 2}) == [1, 3]
    assert key_text(7) == "trial-7"
    assert key_text("ab-cd") == "command-ab-cd"


def _request(num_slots: int, *, is_on_one_node: bool = False) -> ResourceRequest:
    return ResourceRequest(7, num_slots, is_on_one_node, frozenset(), lambda: (_TITLE, {}))


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
