"""Environment variables that configure Accelerate in launched scripts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sample_layouts import plain_saved_run

from dstrial.errors import ConfigError
from dstrial.launch.accelerate_environment import accelerate_variables

BASE = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": True}}


def variables(tmp_path: Path, config: Any = None, num_ranks: int = 2, **more: Any) -> dict[str, str]:
    return accelerate_variables(
        {"deepspeed_config": BASE if config is None else config},
        num_ranks=num_ranks,
        directory=tmp_path,
        environ=more.pop("environ", {}),
        **more,
    )


def written(tmp_path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((tmp_path / "deepspeed_config.json").read_text())
    return content


def test_variables_enable_deepspeed_and_name_config_file(tmp_path: Path) -> None:
    assert variables(tmp_path) == {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(tmp_path / "deepspeed_config.json"),
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "2",
    }


def test_gradient_accumulation_is_derived_from_batch_size(tmp_path: Path) -> None:
    """Accelerate sets gradient_accumulation_steps to 1 if the config has none."""
    variables(tmp_path)
    assert written(tmp_path)["gradient_accumulation_steps"] == 2
    variables(tmp_path, num_ranks=4)
    assert written(tmp_path)["gradient_accumulation_steps"] == 1


def test_auto_values_stay_auto_in_config_copy(tmp_path: Path) -> None:
    config = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "fp16": {"enabled": "auto"},
    }
    told = variables(tmp_path, config)
    assert written(tmp_path) == {**config, "zero_optimization": {"stage": 0}}
    assert sorted(told) == ["ACCELERATE_DEEPSPEED_CONFIG_FILE", "ACCELERATE_USE_DEEPSPEED"]


def test_config_copy_has_overwrites_and_leaves_user_file(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(BASE))
    told = accelerate_variables(
        {
            "deepspeed_config": "ds.json",
            "overwrite_deepspeed_args": {"zero_optimization": {"stage": 3}, "bf16": None},
        },
        num_ranks=1,
        directory=tmp_path,
        environ={},
        context_dir=tmp_path,
    )
    assert written(tmp_path)["zero_optimization"] == {"stage": 3}
    assert "ACCELERATE_MIXED_PRECISION" not in told
    assert json.loads((tmp_path / "ds.json").read_text()) == BASE


def test_user_environment_variables_take_precedence(tmp_path: Path) -> None:
    own = {"ACCELERATE_DEEPSPEED_CONFIG_FILE": "mine.json", "ACCELERATE_MIXED_PRECISION": "no"}
    assert variables(tmp_path, environ=own) == {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "2",
    }
    assert variables(tmp_path, environ={"ACCELERATE_USE_DEEPSPEED": "false"}) == {}


def test_no_variables_without_deepspeed_config(tmp_path: Path) -> None:
    assert accelerate_variables({"lr": 1}, num_ranks=2, directory=tmp_path, environ={}) == {}
    assert list(tmp_path.iterdir()) == []


def test_batch_size_not_divisible_by_ranks_is_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="train_batch_size is 16"):
        variables(tmp_path, num_ranks=3)


def test_resume_on_fewer_ranks_keeps_batch_size(tmp_path: Path) -> None:
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1}
    saved = plain_saved_run(replicas=2, micro=4, accumulation=1, given=config)
    variables(tmp_path, config, num_ranks=1, resumed=saved)
    assert [written(tmp_path)[key] for key in ("train_batch_size", *config)] == [8, 4, 2]
