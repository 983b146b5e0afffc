"""The search methods ``asha``, ``binary`` and ``random`` on a formula."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from predicted import inputs
from surfaces import BASE, assert_search_invariants, play, space, surface

from dstrial.dsat.core.candidate import Candidate
from dstrial.dsat.core.outcome import Failure, FailureKind, Measured, Outcome
from dstrial.dsat.methods import search_method
from dstrial.dsat.methods.base import MethodOptions, Note, Skip
from dstrial.dsat.methods.random_structures import AshaSearch, BinarySearch, RandomConfigSearch
from dstrial.dsat.predictor.config_groups import ConfigGroups
from dstrial.dsat.space.filters import Filters, Observation
from dstrial.dsat.space.space import Structure
from dstrial.errors import SearchError

METHODS = ("asha", "binary", "random")


@pytest.mark.parametrize("name", METHODS)
@given(seed=st.integers(0, 10_000), num_parallel=st.integers(1, 4), max_trials=st.integers(1, 12))
@settings(max_examples=6, deadline=None)
def test_search_satisfies_invariants(name: str, seed: int, num_parallel: int, max_trials: int) -> None:
    searched = space()

    played = play(name, searched, seed=seed, num_parallel=num_parallel, max_trials=max_trials)

    assert_search_invariants(played, searched, num_parallel=num_parallel, max_trials=max_trials)


@pytest.mark.parametrize("name", METHODS)
def test_replayed_search_requests_same_trials(name: str) -> None:
    once = play(name, max_trials=14, num_parallel=3)
    again = play(name, max_trials=14, num_parallel=3, restart=True)

    assert once.actions == again.actions


@pytest.mark.parametrize("name", METHODS)
def test_other_seed_gives_other_candidates(name: str) -> None:
    first, second = (play(name, max_trials=8, seed=seed) for seed in (1, 2))

    assert [one.candidate for one in first.measured] != [one.candidate for one in second.measured]


@pytest.mark.parametrize("name", METHODS)
def test_gates_reduce_out_of_memory_trials(name: str) -> None:
    gated = play(name, max_trials=40)
    original = play(name, max_trials=40, no_gates=True)

    if name == "random":
        assert original.oom_share > 0.8
        assert gated.oom_share < original.oom_share / 1.5
    skipped = [action for action in gated.actions if isinstance(action, Skip)]
    assert all(action.candidate not in [one.candidate for one in gated.measured] for action in skipped)
    assert not [action for action in original.actions if isinstance(action, Skip)]


def test_first_measurement_prints_model_lines() -> None:
    notes = [action.text for action in play("asha", max_trials=2).actions if isinstance(action, Note)]

    assert [line.partition(":")[0] for line in notes] == [
        "Model size",
        "Parameters, gradients and optimizer state per device",
        "Memory of a device",
        "Activations per record",
        "Largest micro batch",
    ]


@pytest.mark.parametrize("name", ["binary", "predict"])
@pytest.mark.parametrize("kind", [FailureKind.USER_ERROR, FailureKind.CANCELED])
def test_user_error_ends_search(name: str, kind: FailureKind) -> None:
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


def test_low_ceiling_is_raised_with_gates_only() -> None:
    largest = {}
    for no_gates in (False, True):
        searched = space(free_batch=True, stages=(2,))
        played = play("binary", searched, max_trials=10, no_gates=no_gates, search_range_factor=0.2)
        largest[no_gates] = max(one.candidate.batch.micro_batch_size for one in played.measured)

    assert largest[False] > 2 * largest[True]


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
    method = AshaSearch(searched, MethodOptions(**options), Filters(searched))

    assert [method.trials_of(rung) for rung in range(5)] == expected


def test_asha_promotes_better_lineages_only() -> None:
    searched = space(free_batch=True)
    method = AshaSearch(
        searched, MethodOptions("throughput", max_trials=40, min_binary_search_trials=2), Filters(searched)
    )
    _finish(method)

    completed = [one for one in method.lineages if one.rung > 0 or method.is_complete(one)]
    promoted = [one for one in completed if one.rung > 0]
    left = [one for one in completed if one.rung == 0]
    assert promoted
    # Promotion starts before all lineages are complete, so slightly more than half may be promoted.
    assert len(promoted) < 2 / 3 * len(completed)
    assert max(one.best(0) or 0.0 for one in promoted) > max(one.best() or 0.0 for one in left)
    for one in promoted:
        assert len(one.history) > method.trials_of(0) or one.is_open


def test_random_respects_its_limits() -> None:
    """Limits: trials per structure, stage 3 only if needed, early stopping."""
    searched = space(free_batch=True, stages=(1, 2))
    options = MethodOptions("throughput", max_trials=30, trials_per_random_config=2)
    method = RandomConfigSearch(searched, options, Filters(searched))
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


def test_smaller_bucket_is_retried_after_out_of_memory() -> None:
    searched = space()
    filters = Filters(searched)
    filters.note_params(1e5)
    known = [Observation(searched.own(), Failure(FailureKind.DEVICE_OOM, "out of memory"))]
    position = searched.batch_size_grid.position(searched.own().batch.micro_batch_size)

    def verdict(num_elements: int) -> str | None:
        settings = (("zero_optimization.reduce_bucket_size", num_elements),)
        found = filters.check(searched.candidate(Structure(1, settings), position), known)
        return found and found.kind

    assert [verdict(num) for num in (10**6, 5 * 10**8, 10**9)] == [None, "again", "again"]


def test_search_method_unknown_is_refused() -> None:
    for name in ("grid", "prediction"):
        with pytest.raises(SearchError, match="expected one of"):
            search_method(name, space(), MethodOptions(), Filters(space()))


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
