"""The benchmark of loggers trains with each of them and prints its table."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "loggers.py"


@pytest.mark.loggers
@pytest.mark.ranks
@pytest.mark.timeout(600)
def test_the_table_has_every_logger(tmp_path: Path) -> None:
    words = ["--batches", "40", "--rounds", "1", "--report-every", "10", "--width", "8"]
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *words],
        cwd=tmp_path,
        env={**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split("|")[1].strip() for line in done.stdout.splitlines() if line.startswith("| ")]
    assert rows == ["loggers", "none", "wandb (offline)", "mlflow (SQLite)", "trackio", "all three"]
