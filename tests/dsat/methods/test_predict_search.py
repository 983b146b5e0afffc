"""A whole search by prediction with real DeepSpeed: described, dry-run, measured in a living worker, resumed; and a plan."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import warm_start

from dstrial.testing.master import MasterForTest

ROOT = Path(__file__).resolve().parents[3]
CONFIG = ROOT / "experiment_configs" / "dsat_trial.yaml"
MODEL_DIR = ROOT / "model_defs" / "dsat_trial"

pytestmark = pytest.mark.timeout(1200)


def run(*words: str, more: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return warm_start.run_command(
        [sys.executable, "-m", "dstrial.dsat", *words],
        env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", **(more or {})},
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )


def events(output: Path, kind: str) -> list[dict[str, Any]]:
    lines = (output / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


@pytest.mark.ranks
def test_predict_describes_the_trial_measures_the_machine_and_keeps_what_it_started_from(
    tmp_path: Path, shared_master: MasterForTest
) -> None:
    output = tmp_path / "out"
    config = tmp_path / "exp.yaml"
    config.write_text(CONFIG.read_text().replace("name: dsat_trial", "name: predict on a master"))
    words = (str(config), str(MODEL_DIR), "--output", str(output), "--metric", "throughput")
    flags = ("--measure-seconds", "0.2", "--max-trials", "2", "-z", "0")

    first = run(*words, *flags, more=shared_master.env)

    assert first.returncode == 0, first.stdout + first.stderr
    described = (
        "described by fake tensors (4 of 4 kinds of structures; of a loader's first batches the largest)"
    )
    assert described.replace("by ", "by:  ", 1) in first.stdout
    notes = json.loads((output / "report.json").read_text())["notes"]
    assert described in notes
    assert [
        note for note in notes if note.startswith("model FLOPs are ") and " x 6 x parameters x tokens" in note
    ]
    (inputs,) = events(output, "inputs")
    assert inputs["is_cpu"]
    assert not inputs["failures"]
    # Stage 0 and the user's own stage 1, with and without accumulation.
    assert len(inputs["runs"]) == 4
    own, *others = events(output, "result")
    assert own["metrics"]["machine_flops_per_s"] > 1e8
    assert own["metrics"]["machine_all_reduce_latency_s"] > 0
    assert len(others) <= 1
    forecasts = json.loads((output / "snapshot.json").read_text())["forecasts"]
    assert {"1"} <= set(forecasts)
    assert forecasts["1"]["parts"]["transfer"] > 0
    assert forecasts["1"]["phase_bytes"]["backward"] > 0
    again = run(*words, *flags, more=shared_master.env)
    assert again.stdout.count("begins") == again.stdout.count("describe:") == 0
    assert len(events(output, "inputs")) == 1


@pytest.mark.process
def test_a_plan_for_hardware_that_is_not_here_is_printed_and_written(tmp_path: Path) -> None:
    flags = ("--slots", "8", "--device", "h100", "-z", "3", "--output", str(tmp_path))

    planned = run("plan", str(CONFIG), str(MODEL_DIR), *flags)

    assert planned.returncode == 0, planned.stdout + planned.stderr
    assert "not measured" in planned.stdout
    assert "predicted best 1" in planned.stdout
    report = json.loads((tmp_path / "report.json").read_text())
    assert [note for note in report["notes"] if note.startswith("one device alone, without offload")]
    assert report["is_measured"] is False
    assert report["slots"] == 8
    assert report["device_memory_bytes"] == 80 * 2**30
    stages = {row["candidate"]["stage"] for row in report["rows"]}
    assert stages == {1, 3}
    offloaded = [row for row in report["rows"] if "offload_param.device=cpu" in row["description"]]
    assert all(row["host_bytes"] > 0 and row["fits"] and row["margin_bytes"] > 0 for row in offloaded)
