"""Trials that keep their batch size on any slots and log their batches' records."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import yaml
from submitting import experiment, log_of
from waiting import wait_for

from dstrial.testing.master import MasterForTest

DEFINITIONS = Path(__file__).parents[2] / "programs"
DEEPSPEED = {
    "train_batch_size": 12,
    "train_micro_batch_size_per_gpu": 6,
    "gradient_accumulation_steps": 1,
    "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
}
SIZES_OF_ONE = "sizes [12, 6, 2, 1]"


def project(directory: Path, name: str, batches: int, sleep_s: float, **fields: Any) -> tuple[Path, Path]:
    """Write a config and a context directory; return both paths."""
    context = directory / "context"
    if not context.is_dir():
        context.mkdir()
        for module in ("small_trials.py", "small_records.py", "kept_batch_trials.py"):
            shutil.copy(DEFINITIONS / module, context)
    given = {
        "name": name,
        "entrypoint": "kept_batch_trials:Noted",
        "hyperparameters": {
            "deepspeed_config": DEEPSPEED,
            "dropout": 0.0,
            "num_records": 84,
            "num_validation_records": 12,
            "record_log": str(directory / f"{name}.log"),
            "batch_sleep_s": sleep_s,
        },
        "searcher": {"name": "single", "metric": "validation_loss", "max_length": {"batches": batches}},
        "resources": {"slots_per_trial": 2},
        "scheduling_unit": 1,
        "max_restarts": 0,
        **fields,
    }
    path = directory / f"{name}.yaml"
    path.write_text(yaml.safe_dump(given))
    return path, context


def create(master: MasterForTest, paths: tuple[Path, Path]) -> int:
    """Submit a project with ``det`` and return the experiment's id."""
    created = master.det("e", "create", *map(str, paths))
    assert created.returncode == 0, created.stdout + created.stderr
    return int(re.findall(r"Created experiment (\d+)", created.stdout)[0])


def state_of(master: MasterForTest, experiment_id: int) -> str:
    return str(experiment(master, experiment_id)["state"]).removeprefix("STATE_")


def wait_for_end(master: MasterForTest, experiment_id: int) -> None:
    wait_for(lambda: state_of(master, experiment_id) in ("COMPLETED", "ERROR", "CANCELED"), deadline_s=200)
    assert state_of(master, experiment_id) == "COMPLETED", log_of(master, experiment_id)


def batches_of(log: Path) -> list[int]:
    lines = [line for path in log.parent.glob(log.name + ".*") for line in path.read_text().splitlines()]
    return sorted({json.loads(line)[0] for line in lines})
