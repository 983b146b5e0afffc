"""The loop-overhead benchmark prints a complete table; times are not asserted."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "loop_overhead.py"
LOOPS = ("bare", "dstrial", "silent", "huggingface", "determined")
RUN_TIMEOUT_S = 240


def run_benchmark(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        cwd=cwd,
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
        check=False,
    )


def rows_of(markdown: str) -> list[list[str]]:
    lines = [line for line in markdown.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.exhaustive("[1-3]")
@pytest.mark.ranks
@pytest.mark.parametrize(("num_ranks", "gas"), [(1, 3), (2, 1)])
def test_loop_overhead_table_has_row_per_loop(tmp_path: Path, num_ranks: int, gas: int) -> None:
    results = tmp_path / "results.json"
    finished = run_benchmark(
        *("--ranks", str(num_ranks), "--gas", str(gas), "--batches", "10", "--report-every", "5"),
        *("--metrics", "2", "--json", str(results)),
        cwd=tmp_path,
    )
    assert finished.returncode == 0, finished.stderr
    assert f"### {num_ranks} rank" in finished.stdout

    header, _, *rows = rows_of(finished.stdout)
    others = ["Hugging Face's Trainer", "Determined 0.38.1"]
    assert [row[0] for row in rows] == ["bare DeepSpeed", "dstrial", "dstrial without heartbeats", *others]
    assert all(len(row) == len(header) for row in rows)
    assert all(any(character.isdigit() for character in cell) for row in rows[1:] for cell in row[1:])
    assert all(f"{name} / dstrial:" in finished.stdout for name in others)
    assert "per micro batch without a report" in finished.stdout
    assert re.search(r"^Heartbeats: -?\d+\.\d\d \[.*\] per micro batch", finished.stdout, re.MULTILINE)

    [result] = json.loads(results.read_text())["results"]
    assert result["num_ranks"] == num_ranks
    numbered = [(block["loop"], block["block_idx"]) for block in result["blocks"]]
    assert sorted(numbered) == sorted((loop, block_idx) for loop in LOOPS for block_idx in range(2))
    for block in result["blocks"]:
        assert block["step_us"] > block["draw_us"] > 0
        assert block["between_us"] > 0
        assert math.isfinite(block["report_us"])
    assert list(result["summaries"]) == list(LOOPS)
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


@pytest.mark.process
@pytest.mark.parametrize(("option", "number", "least"), [("--batches", 0, "1"), ("--report-every", 3, "4")])
def test_loop_overhead_rejects_too_small_number(tmp_path: Path, option: str, number: int, least: str) -> None:
    finished = run_benchmark(option, str(number), cwd=tmp_path)
    assert finished.returncode == 2
    assert f"{option} is {number}; expected at least {least}" in finished.stderr
