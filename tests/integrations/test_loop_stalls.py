"""Stall reports for Hugging Face Trainer and Accelerate training loops."""

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


def launch(directory: Path, loop: str, attack: str) -> subprocess.CompletedProcess[str]:
    """Train ``loop`` on two ranks with a stall timeout of 2 seconds."""
    program = PROGRAMS[loop]
    (directory / "ds_config.json").write_text(json.dumps(AUTO))  # read by stalling_trainer.py
    shutil.copy(program, directory)
    experiment = {
        "name": "stalling",
        "entrypoint": f"python3 -m dstrial.launch {program.name}",
        **EXPERIMENTS[loop],
        "data": {"dstrial": {"stall_timeout": 2, "stall_action": "restart"}},
    }
    (directory / "e.yaml").write_text(yaml.safe_dump(experiment))
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "DSTRIAL_"))
    }
    return warm_start.run(
        ["dstrial.launch", "--config", "e.yaml", "--slots", "2", program.name, attack],
        cwd=directory,
        env={**kept, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"},
        timeout=300,
        is_merged=True,
    )


@both
@pytest.mark.exhaustive("[trainer]")
def test_stall_in_data_loader_is_reported_with_rank(tmp_path: Path, loop: str) -> None:
    run = launch(tmp_path, loop, "silent")
    assert run.returncode == 1, run.stdout
    (line,) = re.findall("dstrial.launch: (stalled: .*Nothing has moved.*)", run.stdout)
    assert line.startswith("stalled: rank 1 waits for its data loader at batch 4 in train_batch")
    assert f"in read_from_storage ({PROGRAMS[loop].name}:" in line
    assert "rank 0 waits for it in a collective" in line
    assert "rank 1 failed first" in run.stdout


@both
@pytest.mark.exhaustive("[reporter]")
def test_slow_script_between_batches_is_not_stalled(tmp_path: Path, loop: str) -> None:
    run = launch(tmp_path, loop, "slow")
    assert run.returncode == 0, run.stdout
    assert f"rank 1 is at {'step' if loop == 'trainer' else 'batch'} 16" in run.stdout
    assert "stalled: " not in run.stdout
    if loop == "reporter":
        assert "slow: rank 1 is at batch 10 between batches, in main (stalling_reporter.py:" in run.stdout
