"""``min_slots``, ``max_slots`` and ``resize_period`` of ``data.dstrial``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from dstrial.config.experiment_config.config import load_experiment
from dstrial.config.experiment_config.dstrial_section import (
    Elasticity,
    elasticity_of,
    shares,
)
from dstrial.errors import ConfigError

DEEPSPEED = {"train_batch_size": 12, "optimizer": {"type": "AdamW"}}


def problems(tmp_path: Path, slots: int, section: dict[str, Any], **deepspeed: Any) -> list[str]:
    path = tmp_path / "exp.yaml"
    (tmp_path / "model_def.py").write_text(
        "import dstrial\n\n\nclass Mine(dstrial.DeepSpeedTrial):\n    pass\n"
    )
    given = {
        "name": "elastic",
        "entrypoint": "model_def:Mine",
        "hyperparameters": {"deepspeed_config": {**DEEPSPEED, **deepspeed}},
        "resources": {"slots_per_trial": slots},
        "searcher": {"name": "single", "metric": "loss", "max_length": {"batches": 10}},
        "data": {"dstrial": section},
    }
    path.write_text(yaml.safe_dump(given))
    try:
        load_experiment(path, tmp_path)
    except ConfigError as error:
        return [str(problem) for problem in error.problems]
    return []


def test_what_is_said_and_what_follows_where_nothing_is() -> None:
    assert elasticity_of({}, 4) == Elasticity(4, None, 4, 600.0)
    assert elasticity_of({"min_slots": 2, "max_slots": 8, "resize_period": 60}, 4) == Elasticity(
        4, 2, 8, 60.0
    )
    assert not elasticity_of({}, 4).is_asked_for
    assert elasticity_of({"min_slots": 1}, 4).is_asked_for
    assert elasticity_of({"max_slots": 8}, 4).is_asked_for


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"min_slots": 5}, "data.dstrial.min_slots is 5; expected at most 4, the slots_per_trial"),
        ({"max_slots": 3}, "data.dstrial.max_slots is 3; expected at least 4, the slots_per_trial"),
        ({"min_slots": 0}, "expected an integer of at least 1"),
        ({"max_slots": True}, "expected an integer of at least 1"),
        ({"resize_period": "10m"}, "expected a number of seconds"),
        ({"resize_period": -1}, "expected a number of seconds"),
    ],
)
def test_each_wrong_value_is_named(tmp_path: Path, section: dict[str, Any], said: str) -> None:
    (found,) = problems(tmp_path, 4, section)
    assert said in found


def test_all_are_named_at_once(tmp_path: Path) -> None:
    assert len(problems(tmp_path, 4, {"min_slots": 5, "max_slots": 3, "resize_period": 0})) == 3


def test_a_batch_that_leaves_no_choice_of_slots_is_refused_before_anything_runs(tmp_path: Path) -> None:
    (found,) = problems(tmp_path, 4, {"min_slots": 3}, train_batch_size=20)
    assert "3 to 4 slots, none of which but 4 can share a batch of 20 records" in found
    assert "a range with one of 1, 2, 5, 10" in found
    (found,) = problems(tmp_path, 4, {"max_slots": 5}, train_batch_size=12)
    assert found.partition(" is ")[0].endswith("data.dstrial.max_slots")
    assert not problems(tmp_path, 4, {"min_slots": 3, "max_slots": 6})
    assert not problems(tmp_path, 4, {"min_slots": 4}, train_batch_size=20), "it asks for no choice"


def test_slots_share_a_batch_by_whole_replicas() -> None:
    assert [n for n in range(1, 13) if shares(n, 12, 1)] == [1, 2, 3, 4, 6, 12]
    assert [n for n in range(1, 13) if shares(n, 12, 2)] == [2, 4, 6, 8, 12]
