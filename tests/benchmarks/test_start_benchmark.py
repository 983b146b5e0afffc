"""The start-up benchmark prints one row per launcher; times are not asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "start.py"


# On its first run on a machine DeepSpeed compiles its shared-memory collectives, which may take minutes.
@pytest.mark.ranks
@pytest.mark.timeout(900)
def test_start_table_has_torchrun_and_dstrial_rows(tmp_path: Path) -> None:
    results = tmp_path / "starts.json"
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), "--ranks", "1", "--repeats", "1", "--json", str(results)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=880,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    rows = [line.split("|")[1:-1] for line in ended.stdout.splitlines()[2:]]
    ways = ["torchrun, plain DeepSpeed", "dstrial.launch, cold", "dstrial.launch, forked"]
    assert [row[1].strip() for row in rows] == ways
    assert all(len(row) == 8 for row in rows)
    found = json.loads(results.read_text())
    assert [(one["num_ranks"], one["way"]) for one in found] == [(1, way) for way in ways]
    assert all(len(one["starts"]) == 1 and min(one["starts"][0].values()) > 0 for one in found)
