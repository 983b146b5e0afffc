"""A stalled Trainer or Accelerate loop is reported as a DeepSpeedTrial is, and one that is only slow is not."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from stalling import launch_stalling, require_left_out_collective, require_silent_loader, require_stopped_rank

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]

PROGRAMS = {
    "trainer": Path(__file__).parent / "huggingface" / "stalling_trainer.py",
    "reporter": Path(__file__).parent / "accelerate" / "stalling_reporter.py",
}
AUTO: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}},
    "zero_optimization": {"stage": 1},
}
SIZES = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}}
EXPERIMENTS: dict[str, dict[str, Any]] = {
    "trainer": {"searcher": {"name": "single", "metric": "eval_loss", "max_length": {"batches": 16}}},
    "reporter": {
        "hyperparameters": {"deepspeed_config": SIZES},
        "searcher": {"name": "single", "metric": "validation_loss", "max_length": {"batches": 16}},
        "min_validation_period": {"batches": 3},
        "min_checkpoint_period": {"batches": 5},
    },
}
both = pytest.mark.parametrize("loop", PROGRAMS)


def launch(directory: Path, loop: str, attack: str, *, timeout: float) -> subprocess.CompletedProcess[str]:
    (directory / "ds_config.json").write_text(json.dumps(AUTO))  # which the Trainer names
    return launch_stalling(directory, PROGRAMS[loop], attack, EXPERIMENTS[loop], timeout=timeout)


@both
@pytest.mark.exhaustive(
    "tests/trainer/test_stalls.py::test_a_stopped_rank_is_named_with_who_waits_for_it_and_training_goes_on_with_it"
)
def test_stopped_rank_is_named(tmp_path: Path, loop: str) -> None:
    require_stopped_rank(launch(tmp_path, loop, "stopped", timeout=600))


@both
@pytest.mark.exhaustive(
    "tests/trainer/test_stalls.py::test_a_collective_that_a_rank_leaves_out_is_told_by_both_places"
)
def test_left_out_collective_is_named_by_both_places(tmp_path: Path, loop: str) -> None:
    place = "training_step (stalling_trainer.py" if loop == "trainer" else "main (stalling_reporter.py"
    require_left_out_collective(launch(tmp_path, loop, "skipped", timeout=2), place)


@both
@pytest.mark.exhaustive("[trainer]")
def test_silent_loader_is_named_with_its_rank(tmp_path: Path, loop: str) -> None:
    require_silent_loader(launch(tmp_path, loop, "silent", timeout=2), PROGRAMS[loop])


@both
@pytest.mark.exhaustive("[reporter]")
def test_slow_script_between_batches_is_no_stall(tmp_path: Path, loop: str) -> None:
    run = launch(tmp_path, loop, "slow", timeout=2)
    assert run.returncode == 0, run.stdout
    assert f"rank 1 is at {'step' if loop == 'trainer' else 'batch'} 16" in run.stdout
    assert "stalled: " not in run.stdout
    if loop == "reporter":
        assert "slow: rank 1 is at batch 10 between batches, in main (stalling_reporter.py:" in run.stdout
