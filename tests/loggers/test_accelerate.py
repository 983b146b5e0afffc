"""Loggers of an Accelerate training loop."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import stores
import warm_start
import yaml

pytestmark = [pytest.mark.loggers, pytest.mark.ranks, pytest.mark.timeout(600)]

PROGRAM = Path(__file__).parent.parent / "integrations" / "accelerate" / "reporter_program.py"
CONFIG = {
    "name": "reporter",
    "entrypoint": "python3 -m dstrial.launch reporter_program.py",
    "hyperparameters": {
        "deepspeed_config": {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4},
        "lr": 0.01,
    },
    "searcher": {"name": "single", "metric": "validation_loss", "max_length": {"batches": 6}},
    "scheduling_unit": 1,
    "min_validation_period": {"batches": 3},
    "data": {"dstrial": {"loggers": ["mlflow"]}},
}


def test_accelerate_reporter_logs_reports_and_final_state(tmp_path: Path) -> None:
    shutil.copy(PROGRAM, tmp_path)
    (tmp_path / "e.yaml").write_text(yaml.safe_dump(CONFIG))
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "DSTRIAL_"))
    }
    env = {**kept, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    words = ["dstrial.launch", "--config", "e.yaml", "--slots", "2", "reporter_program.py", "--stop-at", "4"]
    ended = warm_start.run(words, cwd=tmp_path, env=env, timeout=300, is_merged=True)
    assert ended.returncode == 0, ended.stdout
    (metrics,) = tmp_path.glob("runs/reporter/*/metrics.jsonl")
    rows = list(map(json.loads, metrics.read_text().splitlines()))
    (run,) = stores.read("mlflow", f"sqlite:///{tmp_path / 'runs' / 'mlflow.db'}")
    stored = {(step, name, value) for step, metrics in run["rows"] for name, value in metrics.items()}
    expected = {
        (row["steps_completed"], f"{row['group']}/{name}", value)
        for row in rows
        for name, value in row["metrics"].items()
        if (row["group"] == "training" or name not in ("batches", "epochs"))
        and isinstance(value, int | float)  # loggers omit text and lists
    }
    assert {entry for entry in stored if entry[1] != "epochs"} == expected
    assert run["status"] == "KILLED"
