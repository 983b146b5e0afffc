"""A Trainer that goes on no more is told of as a DeepSpeedTrial is, and one that is only slow is not."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import warm_start
import yaml

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
    shutil.copy(PROGRAM, directory)
    (directory / "ds_config.json").write_text(json.dumps(DEEPSPEED))
    experiment = {
        "name": "stalling",
        "entrypoint": f"python3 -m dstrial.launch {PROGRAM.name}",
        "searcher": {"name": "single", "metric": "eval_loss", "max_length": {"batches": 16}},
        "data": {"dstrial": {"stall_timeout": timeout, "stall_action": "restart"}},
    }
    (directory / "e.yaml").write_text(yaml.safe_dump(experiment))
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "DSTRIAL_"))
    }
    return warm_start.run(
        ["dstrial.launch", "--config", "e.yaml", "--slots", "2", PROGRAM.name, attack],
        cwd=directory,
        env={**kept, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"},
        timeout=300,
        is_merged=True,
    )


def line_of(run: subprocess.CompletedProcess[str]) -> str:
    assert run.returncode == 1, run.stdout
    (line,) = re.findall("dstrial.launch: (stalled: .*Nothing has moved.*)", run.stdout)
    return str(line)


def test_a_stopped_rank_of_a_trainer_is_named(tmp_path: Path) -> None:
    run = launch(tmp_path, "stopped", timeout=600)
    assert line_of(run).startswith(
        "stalled: rank 1 is stopped (SIGSTOP) at batch 4 in train_batch; rank 0 waits for it in a collective (all"
    )
    assert "rank 1 failed first" in run.stdout


def test_a_collective_that_a_rank_of_a_trainer_leaves_out_is_told_by_both_places(tmp_path: Path) -> None:
    line = line_of(launch(tmp_path, "skipped", timeout=2))
    assert "rank 0 is in barrier of training_step (stalling_trainer.py:" in line
    assert "rank 1 is in all" in line
    assert "left a collective out" in line


def test_a_loader_of_a_trainer_that_never_answers_is_named_with_its_rank(tmp_path: Path) -> None:
    run = launch(tmp_path, "silent", timeout=2)
    line = line_of(run)
    assert line.startswith("stalled: rank 1 waits for its data loader at batch 4 in train_batch")
    assert "in read_from_storage (stalling_trainer.py:" in line
    assert "rank 0 waits for it in a collective" in line
    assert "rank 1 failed first" in run.stdout


def test_what_takes_long_between_the_steps_of_a_trainer_is_no_stall(tmp_path: Path) -> None:
    run = launch(tmp_path, "slow", timeout=2)
    assert run.returncode == 0, run.stdout
    assert "rank 1 is at step 16" in run.stdout
    assert "stalled: " not in run.stdout
