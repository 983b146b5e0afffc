"""The small trial of these tests: its config, its files, and what its ranks print."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

ENVIRON = {"DS_ACCELERATOR": "cpu", "PYTHONPATH": "", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
CONFIG: dict[str, Any] = {
    "name": "small",
    "entrypoint": "small_trial:SmallTrial",
    "searcher": {"name": "single", "metric": "zero", "max_length": {"batches": 20}},
    "hyperparameters": {"zero_stage": 1, "pause_s": 0.0},
    "scheduling_unit": 5,
    "min_validation_period": {"batches": 1000},
    "min_checkpoint_period": {"batches": 10},
    "max_restarts": 2,
}


def copy_into(directory: Path, *names: str) -> Path:
    for name in names:
        shutil.copy(Path(__file__).parent / name, directory)
    return directory


def losses(text: str) -> list[str]:
    return re.findall(r"batch \d+ loss 0x\S+", text)


def batches(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"batch (\d+) loss ", text)]
