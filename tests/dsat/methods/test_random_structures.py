"""The search methods ``asha``, ``binary`` and ``random`` on a formula."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from predicted import inputs
from surfaces import BASE, assert_search_invariants, play, space, surface

from dstrial.dsat.core.candidate import Candidate
from dstrial.dsat.core.outcome import Failure, FailureKind, Measured, Outcome
from dstrial.dsat.methods.base import MethodOptions
from dstrial.dsat.methods.random_structures import AshaSearch, BinarySearch, RandomConfigSearch
from dstrial.dsat.predictor.config_groups import ConfigGroups

METHODS = ("asha", "binary", "random")


@pytest.mark.parametrize("name", METHODS)
@given(seed=st.integers(0, 10_000), num_parallel=st.integers(1, 4), max_trials=st.integers(1, 12))
@settings(max_examples=6, deadline=None)
def test_search_satisfies_invariants(name: str, seed: int, num_parallel: int, max_trials: int) -> None:
    searched = space()

    played = play(name, searched, random_seed=seed, num_parallel=num_parallel, max_trials=max_trials)

    assert_search_invariants(played, searched, num_parallel=num_parallel, max_trials=max_trials)


@pytest.mark.parametrize("name", METHODS)
def test_replayed_search_requests_same_trials(name: str) -> None:
    once = play(name, max_trials=14, num_parallel=3)
    again = play(name, max_trials=14, num_parallel=3, restart=True)
    other = play(name, max_trials=14, num_parallel=3, random_seed=1)

    assert once.actions == again.actions
    assert [one.candidate for one in once.measured] != [one.candidate for one in other.measured]


@pytest.mark.parametrize("name", ["binary", "predict"])
@pytest.mark.parametrize("kind", [FailureKind.USER_ERROR, FailureKind.CANCELED, FailureKind.NO_ROOM])
def test_failure_of_all_configurations_ends_search(name: str, kind: FailureKind) -> None:
    failure = Failure(kind, "ModuleNotFoundError: No module named 'x'")

    played = play(
        name,
        outcome_of=lambda _candidate: failure,
        num_parallel=1 if name == "predict" else 4,
        inputs=inputs(),
    )

    assert len(played.measured) == 1
    assert played.finish.is_failure
    assert "No module named" in played.finish.reason


def test_own_out_of_memory_tries_smallest_micro_batch() -> None:
    def small_device(candidate: Candidate) -> Outcome:
        if candidate.batch.micro_batch_size > 1:
            return Failure(FailureKind.DEVICE_OOM, "out of memory")
        return surface(candidate)

    played = play("asha", outcome_of=small_device, max_trials=10)

    assert [one.candidate.batch.micro_batch_size for one in played.measured[:2]] == [4, 1]
    assert not played.finish.is_failure


def test_never_fitting_model_fails_with_advice() -> None:
    played = play("random", outcome_of=lambda _candidate: Failure(FailureKind.DEVICE_OOM, "out of memory"))

    assert len(played.measured) == 2
    assert played.finish.is_failure
    assert "train_micro_batch_size_per_gpu = 1" in played.finish.reason


def test_binary_finds_largest_micro_batch() -> None:
    played = play("binary", space(free_batch=True, stages=(2,)), max_trials=12)

    lineage = [one.candidate for one in played.measured[1:] if one.why == "lineage 1"]
    ran = [c.batch.micro_batch_size for c in lineage if isinstance(surface(c), Measured)]
    failed = [c.batch.micro_batch_size for c in lineage if not isinstance(surface(c), Measured)]
    assert min(failed) == max(ran) + 1


def test_low_ceiling_is_raised() -> None:
    low, usual = (
        play("binary", space(free_batch=True, stages=(2,)), max_trials=20, search_range_factor=factor)
        for factor in (0.2, 1.0)
    )

    largest = [max(one.candidate.batch.micro_batch_size for one in each.measured) for each in (low, usual)]
    assert largest[0] > 0.6 * largest[1]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [3, 6, 12, 24, 48]),
        ({"divisor": 4, "min_binary_search_trials": 2}, [2, 8, 32, 128, 512]),
        ({"asha_early_stopping": 1}, [6, 12, 24, 48, 96]),
    ],
)
def test_asha_rungs_have_documented_sizes(options: dict[str, int], expected: list[int]) -> None:
    searched = space()
    method = AshaSearch(searched, MethodOptions(**options))

    assert [method.trials_of(rung) for rung in range(5)] == expected


def test_asha_promotes_better_lineages_only() -> None:
    searched = space(free_batch=True)
    method = AshaSearch(searched, MethodOptions("throughput", max_trials=40, min_binary_search_trials=2))
    _finish(method)

    completed = [one for one in method.lineages if one.rung > 0 or method.is_complete(one)]
    promoted = [one for one in completed if one.rung > 0]
    left = [one for one in completed if one.rung == 0]
    assert promoted
    # Promotion starts before all lineages are complete, so slightly more than half may be promoted.
    assert len(promoted) < 2 / 3 * len(completed)
    assert max(one.best(0) or 0.0 for one in promoted) > max(one.best(9) or 0.0 for one in left)
    for one in promoted:
        assert len(one.history) > method.trials_of(0) or one.is_open


def test_random_respects_its_limits() -> None:
    """Limits: trials per structure, stage 3 only if needed, early stopping."""
    searched = space(free_batch=True, stages=(1, 2))
    options = MethodOptions("throughput", max_trials=30, trials_per_random_config=2)
    method = RandomConfigSearch(searched, options)
    _finish(method)
    assert max(len(lineage.history) for lineage in method.lineages) <= 2

    assert 3 not in {one.candidate.stage for one in play("random", max_trials=30).measured}

    played = play("random", max_trials=64, early_stopping=4)
    assert "no new best" in played.finish.reason
    assert len(played.measured) < 64


def test_zero_stages_flag_limits_stages() -> None:
    played = play("asha", space(stages=(2,)), max_trials=10)

    assert {one.candidate.stage for one in played.measured[1:]} == {2}


def test_exhausted_space_ends_search() -> None:
    base = {**BASE, "train_batch_size": 16, "train_micro_batch_size_per_gpu": 1}

    played = play("asha", space(base, stages=(0,)), max_trials=64)

    assert [one.candidate.stage for one in played.measured] == [1, 0, 0]
    assert "nothing new" in played.finish.reason


def _finish(method: BinarySearch) -> None:
    waiting = [action for action in method.start() if hasattr(action, "trial_id")]
    while waiting:
        done = waiting.pop(0)
        actions = method.on_result(done.trial_id, surface(done.candidate))
        waiting += [action for action in actions if hasattr(action, "trial_id")]


@pytest.mark.parametrize("name", METHODS)
def test_sizes_above_parameter_count_are_one_candidate(name: str) -> None:
    def small(candidate: Candidate) -> Outcome:
        found = surface(candidate)
        return found if isinstance(found, Failure) else Measured({**found.metrics, "num_params": 1e5})

    searched = space(stages=(1,))

    played = play(name, searched, outcome_of=small, max_trials=30)

    groups = ConfigGroups(searched)
    keys = [groups.identity(one.candidate, 1e5) for one in played.measured]
    assert len(keys) == len(set(keys)) > 1
