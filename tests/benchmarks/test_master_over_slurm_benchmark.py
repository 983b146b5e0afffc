"""The benchmark of what happens under Slurm runs scenarios and prints their rows; no time is asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "hosts"))

from slurm_cluster import missing

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.exhaustive("tests/benchmarks/test_hosts_benchmark.py::test_a_scenario_is_a_row")
@pytest.mark.ranks
@pytest.mark.timeout(900)
def test_scenarios_are_rows(tmp_path: Path) -> None:
    if lacking := missing():
        pytest.skip(f"Requires: {lacking}")
    results = tmp_path / "slurm.json"
    program = str(ROOT / "benchmarks" / "master_over_slurm.py")
    ended = subprocess.run(
        [sys.executable, program, "--scenario", "one node", "kill", "--json", str(results)],
        cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = [line for line in ended.stdout.partition("\n\n")[2].splitlines() if line.startswith("| ")]
    assert len(rows) == 3
    assert len({row.count(" | ") for row in rows}) == 1
    refused, killed = json.loads(results.read_text())
    assert (refused["outcome"], list(refused["seconds"])) == (
        "exit code 1, no experiment is made, nothing is queued",
        ["refused"],
    )
    assert "resources.slots_per_trial is 3; expected a job that Slurm takes" in refused["line"]
    assert killed["outcome"] == "CANCELED"
    assert "the trial was killed" in killed["line"]
