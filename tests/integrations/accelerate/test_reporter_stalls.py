"""An Accelerate loop that goes on no more is told of as a DeepSpeedTrial is, and one that is only slow is not."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

import pytest
from stalling import launch_stalling, require_left_out_collective, require_silent_loader, require_stopped_rank

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        importlib.util.find_spec("accelerate") is None, reason="Requires: [accelerate, transformers]"
    ),
]

PROGRAM = Path(__file__).with_name("stalling_reporter.py")


def launch(directory: Path, attack: str, *, timeout: float) -> subprocess.CompletedProcess[str]:
    deepspeed = {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 1},
    }
    experiment = {
        "hyperparameters": {"deepspeed_config": deepspeed},
        "searcher": {"name": "single", "metric": "validation_loss", "max_length": {"batches": 16}},
        "min_validation_period": {"batches": 3},
        "min_checkpoint_period": {"batches": 5},
    }
    return launch_stalling(directory, PROGRAM, attack, experiment, timeout=timeout)


@pytest.mark.exhaustive(
    "tests/trainer/test_stalls.py::test_a_stopped_rank_is_named_with_who_waits_for_it_and_training_goes_on_with_it"
)
def test_a_stopped_rank_of_an_accelerate_loop_is_named(tmp_path: Path) -> None:
    require_stopped_rank(launch(tmp_path, "stopped", timeout=600))


@pytest.mark.exhaustive(
    "tests/trainer/test_stalls.py::test_a_collective_that_a_rank_leaves_out_is_told_by_both_places"
)
def test_a_collective_that_a_rank_of_a_loop_leaves_out_is_told_by_both_places(tmp_path: Path) -> None:
    run = launch(tmp_path, "skipped", timeout=2)
    require_left_out_collective(run, "main (stalling_reporter.py")


@pytest.mark.exhaustive(
    "tests/integrations/huggingface/test_trainer_stalls.py::test_a_loader_of_a_trainer_that_never_answers_is_named_with_its_rank"
)
def test_a_loader_of_a_loop_that_never_answers_is_named_with_its_rank(tmp_path: Path) -> None:
    require_silent_loader(launch(tmp_path, "silent", timeout=2), PROGRAM)


def test_what_a_script_does_long_between_its_batches_is_one_line_and_no_stall(tmp_path: Path) -> None:
    run = launch(tmp_path, "slow", timeout=2)
    assert run.returncode == 0, run.stdout
    assert "rank 1 is at batch 16" in run.stdout
    assert "stalled: " not in run.stdout
    assert "slow: rank 1 is at batch 10 between batches, in main (stalling_reporter.py:" in run.stdout
