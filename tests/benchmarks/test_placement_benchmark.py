"""The benchmark of placement runs and prints every row; its numbers are nobody's business here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).resolve().parents[2] / "benchmarks" / "placement.py"


@pytest.mark.process
def test_the_benchmark_prints_every_row(tmp_path: Path) -> None:
    arguments = ["--nodes=5", "--slots=2", "--queued=40", "--json", str(tmp_path / "figures")]

    done = subprocess.run(
        [sys.executable, str(PROGRAM), *arguments], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads((tmp_path / "figures").read_text())
    assert figures["many"]["num_placed"] > 0
    assert 0 < figures["many"]["share"] <= 1
    assert sum(line.startswith("| ") for line in done.stdout.splitlines()) == 7
