"""The benchmark of a busy master runs and prints every row; its numbers are nobody's business here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).resolve().parents[2] / "benchmarks" / "busy_master.py"


@pytest.mark.process
def test_the_benchmark_prints_every_row(tmp_path: Path) -> None:
    arguments = [
        "--names=20",
        "--reports=5",
        "--stored=50",
        "--queued=3",
        "--seconds=0.2",
        "--json",
        str(tmp_path / "j"),
    ]

    done = subprocess.run(
        [sys.executable, str(PROGRAM), *arguments], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stdout + done.stderr
    (figures,) = json.loads((tmp_path / "j").read_text())
    assert set(figures) == {"few_us", "many_us", "stored_us", "none_percent", "queued_percent"}
    assert [line.split(" | ")[0] for line in done.stdout.splitlines() if line.startswith("| ")] == [
        "| measured",
        "| report of ten names, 10 before",
        "| report of ten names, 20 before",
        "| the second / the first",
        "| report of ten names, 50 reports of others",
        "| a master's core, one trial runs",
        "| a master's core, 3 wait besides",
    ]
