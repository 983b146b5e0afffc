"""The benchmark of what goes wrong over hosts runs a scenario to its end and prints its row; no time is asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "hosts"))

from machines import missing

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.process
def test_a_scenario_is_a_row(tmp_path: Path) -> None:
    if lacking := missing():
        pytest.skip(f"Requires: {lacking}")
    results = tmp_path / "hosts.json"
    words = ["--scenario", "path", "key", "--launcher", "dstrial", "--json", str(results)]
    ended = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "hosts.py"), *words],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    rows = [line for line in ended.stdout.partition("\n\n")[2].splitlines() if line.startswith("| ")]
    assert len(rows) == 3
    assert len({row.count(" | ") for row in rows}) == 1
    path, key = json.loads(results.read_text())
    assert (path["exit_code"], path["num_trained"], "hots" in path["line"]) == (2, 0, True)
    assert (key["exit_code"], key["num_trained"], key["line"].startswith("host3  refusing the login")) == (
        2,
        0,
        True,
    )
