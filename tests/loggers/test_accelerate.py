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
    "data": {"dstrial": {"loggers": ["trackio"]}},
}


def test_accelerate_reporter_logs_reports_and_final_state(tmp_path: Path) -> None:
    shutil.copy(PROGRAM, tmp_path)
    (tmp_path / "e.yaml").write_text(yaml.safe_dump(CONFIG))
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "DSTRIAL_"))
    }
    env = {**kept, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "TRACKIO_DIR": str(tmp_path / "trackio")}
    words = ["dstrial.launch", "--config", "e.yaml", "--slots", "2", "reporter_program.py", "--stop-at", "4"]
    ended = warm_start.run(words, cwd=tmp_path, env=env, timeout=300, is_merged=True)
    assert ended.returncode == 0, ended.stdout
    (metrics,) = tmp_path.glob("runs/reporter/*/metrics.jsonl")
    rows = list(map(json.loads, metrics.read_text().splitlines()))
    (run,) = stores.read_trackio(tmp_path / "trackio").values()
    stored = [(step, row) for step, row in run["rows"] if "state" not in row]
    expected = [
        (
            row["steps_completed"],
            {
                f"{row['group']}/{name}": value
                for name, value in row["metrics"].items()
                if (row["group"] == "training" or name not in ("batches", "epochs"))
                and isinstance(value, int | float)  # loggers omit text and lists
            },
        )
        for row in rows
    ]
    assert stored == expected
    assert len(expected) >= 4
    assert run["rows"][-1][1] == {"state": "stopped"}
