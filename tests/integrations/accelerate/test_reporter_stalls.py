"""An Accelerate loop that goes on no more is told of as a DeepSpeedTrial is, and one that is only slow is not."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import warm_start
import yaml

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        importlib.util.find_spec("accelerate") is None, reason="Requires: [accelerate, transformers]"
    ),
]

PROGRAM = Path(__file__).with_name("stalling_reporter.py")


def launch(directory: Path, attack: str, *, timeout: float) -> subprocess.CompletedProcess[str]:
    shutil.copy(PROGRAM, directory)
    deepspeed = {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 1},
    }
    experiment = {
        "name": "stalling",
        "entrypoint": f"python3 -m dstrial.launch {PROGRAM.name}",
        "hyperparameters": {"deepspeed_config": deepspeed},
        "searcher": {"name": "single", "metric": "validation_loss", "max_length": {"batches": 16}},
        "min_validation_period": {"batches": 3},
        "min_checkpoint_period": {"batches": 5},
        "data": {"dstrial": {"stall_timeout": timeout, "stall_action": "restart"}},
    }
    (directory / "e.yaml").write_text(yaml.safe_dump(experiment))
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "DSTRIAL_"))
    }
    return warm_start.run(
        ["dstrial.launch", "--config", "e.yaml", "--slots", "2", PROGRAM.name, attack],
        cwd=directory,
        env={**kept, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
        timeout=300,
        is_merged=True,
    )


def line_of(run: subprocess.CompletedProcess[str]) -> str:
    assert run.returncode == 1, run.stdout
    (line,) = re.findall("dstrial.launch: (stalled: .*Nothing has moved.*)", run.stdout)
    return str(line)


def test_a_stopped_rank_of_an_accelerate_loop_is_named(tmp_path: Path) -> None:
    run = launch(tmp_path, "stopped", timeout=600)
    assert line_of(run).startswith(
        "stalled: rank 1 is stopped (SIGSTOP) at batch 4 in train_batch; rank 0 waits for it in a collective (all"
    )
    assert "rank 1 failed first" in run.stdout


def test_a_collective_that_a_rank_of_a_loop_leaves_out_is_told_by_both_places(tmp_path: Path) -> None:
    line = line_of(launch(tmp_path, "skipped", timeout=2))
    assert "rank 0 is in barrier of main (stalling_reporter.py:" in line
    assert "rank 1 is in all" in line
    assert "left a collective out" in line


def test_a_loader_of_a_loop_that_never_answers_is_named_with_its_rank(tmp_path: Path) -> None:
    run = launch(tmp_path, "silent", timeout=2)
    line = line_of(run)
    assert line.startswith("stalled: rank 1 waits for its data loader at batch 4 in train_batch")
    assert "in read_from_storage (stalling_reporter.py:" in line
    assert "rank 0 waits for it in a collective" in line
    assert "rank 1 failed first" in run.stdout


def test_what_a_script_does_long_between_its_batches_is_one_line_and_no_stall(tmp_path: Path) -> None:
    run = launch(tmp_path, "slow", timeout=2)
    assert run.returncode == 0, run.stdout
    assert "rank 1 is at batch 16" in run.stdout
    assert "stalled: " not in run.stdout
    assert "slow: rank 1 is at batch 10 between batches, in main (stalling_reporter.py:" in run.stdout
