"""A Trainer that goes on no more is told of as a DeepSpeedTrial is, and one that is only slow is not."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from stalling import launch_stalling, require_left_out_collective, require_silent_loader, require_stopped_rank

pytest.importorskip("transformers")
pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]

PROGRAM = Path(__file__).with_name("stalling_trainer.py")
DEEPSPEED: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}},
    "zero_optimization": {"stage": 1},
}


def launch(directory: Path, attack: str, *, timeout: float) -> subprocess.CompletedProcess[str]:
    (directory / "ds_config.json").write_text(json.dumps(DEEPSPEED))
    searcher = {"name": "single", "metric": "eval_loss", "max_length": {"batches": 16}}
    return launch_stalling(directory, PROGRAM, attack, {"searcher": searcher}, timeout=timeout)


@pytest.mark.exhaustive(
    "tests/trainer/test_stalls.py::test_a_stopped_rank_is_named_with_who_waits_for_it_and_training_goes_on_with_it"
)
def test_a_stopped_rank_of_a_trainer_is_named(tmp_path: Path) -> None:
    require_stopped_rank(launch(tmp_path, "stopped", timeout=600))


@pytest.mark.exhaustive(
    "tests/trainer/test_stalls.py::test_a_collective_that_a_rank_leaves_out_is_told_by_both_places"
)
def test_a_collective_that_a_rank_of_a_trainer_leaves_out_is_told_by_both_places(tmp_path: Path) -> None:
    run = launch(tmp_path, "skipped", timeout=2)
    require_left_out_collective(run, "training_step (stalling_trainer.py")


def test_a_loader_of_a_trainer_that_never_answers_is_named_with_its_rank(tmp_path: Path) -> None:
    require_silent_loader(launch(tmp_path, "silent", timeout=2), PROGRAM)


@pytest.mark.exhaustive(
    "tests/integrations/accelerate/test_reporter_stalls.py::test_what_a_script_does_long_between_its_batches_is_one_line_and_no_stall"
)
def test_what_takes_long_between_the_steps_of_a_trainer_is_no_stall(tmp_path: Path) -> None:
    run = launch(tmp_path, "slow", timeout=2)
    assert run.returncode == 0, run.stdout
    assert "rank 1 is at step 16" in run.stdout
    assert "stalled: " not in run.stdout
