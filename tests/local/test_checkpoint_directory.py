from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dstrial.config import load_experiment
from dstrial.local.checkpoint_directory import KeepPolicy, checkpoints_to_delete

CHECKPOINTS = [("a", 100), ("b", 200), ("c", 300), ("d", 400)]


def deleted(
    validations: dict[int, float], num_latest: int, num_best: int, *, smaller_is_better: bool = True
) -> list[str]:
    policy = KeepPolicy(num_latest, num_best)
    return checkpoints_to_delete(CHECKPOINTS, validations, policy, smaller_is_better=smaller_is_better)


def test_the_latest_and_the_best_are_kept() -> None:
    assert deleted({100: 0.5, 200: 0.1, 300: 0.3, 400: 0.4}, 1, 1) == ["a", "c"]


def test_larger_can_be_better() -> None:
    assert deleted({100: 0.5, 200: 0.1, 300: 0.3, 400: 0.4}, 1, 1, smaller_is_better=False) == ["b", "c"]


def test_a_checkpoint_that_is_both_counts_for_both() -> None:
    assert deleted({100: 0.5, 400: 0.1}, 1, 1) == ["a", "b", "c"]


def test_the_newest_is_kept_even_if_none_is_asked_for() -> None:
    assert deleted({}, 0, 0) == ["a", "b", "c"]


def test_nan_and_unmeasured_checkpoints_are_never_best() -> None:
    assert deleted({100: math.nan, 200: math.inf}, 1, 4) == ["a", "c"]


def test_of_equals_the_earlier_is_better() -> None:
    assert deleted({100: 0.1, 200: 0.1, 300: 0.1}, 1, 1) == ["b", "c"]


def test_everything_is_kept_where_no_number_is_given() -> None:
    assert KeepPolicy.from_config(None) is None
    assert KeepPolicy.from_config({"type": "shared_fs", "host_path": "/x"}) is None
    not_given = {"save_trial_latest": None, "save_trial_best": None, "save_experiment_best": None}
    assert KeepPolicy.from_config(not_given) is None


def test_determineds_defaults_are_a_policy_where_they_are_given() -> None:
    assert KeepPolicy.from_config({"save_trial_latest": 1, "save_trial_best": 1}) == KeepPolicy(1, 1)
    assert KeepPolicy.from_config({"save_experiment_best": 0}) == KeepPolicy(1, 1)


@pytest.mark.parametrize(
    ("storage", "policy"), [("", None), ("checkpoint_storage: {save_trial_best: 1}", KeepPolicy(1, 1))]
)
def test_the_policy_of_an_experiment_config_is_what_its_file_gives(
    storage: str, policy: KeepPolicy | None, tmp_path: Path
) -> None:
    path = tmp_path / "exp.yaml"
    path.write_text(f"searcher: {{name: single, metric: loss, max_length: {{batches: 1}}}}\n{storage}\n")
    raw = load_experiment(path, tmp_path).raw
    assert KeepPolicy.from_config(raw["checkpoint_storage"]) == policy


def test_missing_fields_have_determineds_defaults() -> None:
    assert KeepPolicy.from_config({"save_trial_latest": 3}) == KeepPolicy(num_latest=3, num_best=1)
    assert KeepPolicy.from_config({"save_trial_best": 0}) == KeepPolicy(num_latest=1, num_best=0)
    assert KeepPolicy.from_config({"save_experiment_best": 2}) == KeepPolicy(num_latest=1, num_best=2)


@given(
    st.lists(st.integers(0, 30), unique=True),
    st.dictionaries(st.integers(0, 30), st.floats()),
    st.integers(0, 5),
    st.integers(0, 5),
    st.booleans(),
)
def test_the_newest_survives_and_at_most_latest_plus_best_are_kept(
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
