"""Selection of checkpoints to delete by KeepPolicy."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dstrial.local.checkpoint_directory import KeepPolicy, checkpoints_to_delete

CHECKPOINTS = [("a", 100), ("b", 200), ("c", 300), ("d", 400)]


@pytest.mark.parametrize(
    ("validations", "num_latest", "num_best", "smaller_is_better", "expected"),
    [
        ({100: 0.5, 200: 0.1, 300: 0.3, 400: 0.4}, 1, 1, True, ["a", "c"]),
        ({100: 0.5, 200: 0.1, 300: 0.3, 400: 0.4}, 1, 1, False, ["b", "c"]),
        ({100: 0.5, 400: 0.1}, 1, 1, True, ["a", "b", "c"]),  # the latest checkpoint is also the best
        ({}, 0, 0, True, ["a", "b", "c"]),  # the newest checkpoint is always kept
        ({100: math.nan, 200: math.inf}, 1, 4, True, ["a", "c"]),  # NaN or no metric is never best
        ({100: 0.1, 200: 0.1, 300: 0.1}, 1, 1, True, ["b", "c"]),  # the earliest of equal metrics is best
    ],
)
def test_policy_keeps_latest_and_best(
    validations: dict[int, float],
    num_latest: int,
    num_best: int,
    smaller_is_better: bool,
    expected: list[str],
) -> None:
    policy = KeepPolicy(num_latest, num_best)
    deleted = checkpoints_to_delete(CHECKPOINTS, validations, policy, smaller_is_better=smaller_is_better)
    assert deleted == expected


@pytest.mark.parametrize(
    ("storage", "policy"),
    [
        (None, None),
        ({"type": "shared_fs", "host_path": "/x"}, None),
        ({"save_trial_latest": None, "save_trial_best": None, "save_experiment_best": None}, None),
        ({"save_trial_latest": 1, "save_trial_best": 1}, KeepPolicy(1, 1)),
        ({"save_experiment_best": 0}, KeepPolicy(1, 1)),
        ({"save_trial_latest": 3}, KeepPolicy(num_latest=3, num_best=1)),
        ({"save_trial_best": 0}, KeepPolicy(num_latest=1, num_best=0)),
        ({"save_experiment_best": 2}, KeepPolicy(num_latest=1, num_best=2)),
    ],
)
def test_keep_policy_missing_fields_use_determined_defaults(
    storage: dict[str, object] | None, policy: KeepPolicy | None
) -> None:
    assert KeepPolicy.from_config(storage) == policy


@given(
    st.lists(st.integers(0, 30), unique=True),
    st.dictionaries(st.integers(0, 30), st.floats()),
    st.integers(0, 5),
    st.integers(0, 5),
    st.booleans(),
)
def test_policy_keeps_newest_and_bounded_count(
    steps: list[int], validations: dict[int, float], num_latest: int, num_best: int, smaller_is_better: bool
) -> None:
    checkpoints = [(f"uuid-{step}", step) for step in steps]
    gone = checkpoints_to_delete(
        checkpoints, validations, KeepPolicy(num_latest, num_best), smaller_is_better=smaller_is_better
    )
    kept = [uuid for uuid, _ in checkpoints if uuid not in gone]
    assert len(gone) == len(set(gone))
    assert len(kept) <= max(1, num_latest) + num_best
    if checkpoints:
        assert checkpoints[-1][0] in kept
