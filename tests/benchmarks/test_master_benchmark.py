"""The master benchmark prints every row; the numbers are not asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).resolve().parents[2] / "benchmarks" / "master.py"


@pytest.mark.process
def test_master_benchmark_prints_every_row(tmp_path: Path) -> None:
    sizes = {
        "repeats": 0,
        "reports": 40,
        "clients": 2,
        "lines": 2000,
        "experiments": 5,
        "trials": 10,
        "metrics": 200,
    }
    sizes["requests"] = 3
    arguments = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]

    done = subprocess.run(
        [sys.executable, str(PROGRAM), *arguments, "--json", str(tmp_path / "rows.json")],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row[0].split(",")[0] for row in rows] == [
        "metric reports per second from 2 clients on the same cores",
        "log lines per second",
        "`GET experiments`",
        "trial list",
        "resident memory then",
    ]
    assert all(f"| {' | '.join(row)} |" in done.stdout for row in rows)
