"""A shortened run of the real checks on CPU ranks, through ``python -m dstrial.doctor.training``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# `.ci/run` runs the same checks as a user does.
pytestmark = [pytest.mark.ranks, pytest.mark.program, pytest.mark.timeout(600)]


def test_the_most_telling_checks_pass_on_cpu_ranks_and_say_what_they_could_not_show(tmp_path: Path) -> None:
    names = "precision,master-trial,shared-device,save,visible-devices,system-metrics,warm-start"
    done = subprocess.run(
        [sys.executable, "-m", "dstrial.doctor.training", "--minutes", "9", "--only", names, "--json"],
        cwd=tmp_path,
        env={**os.environ, "DS_ACCELERATOR": "cpu", "DSTRIAL_RUNS_DIR": str(tmp_path / "runs")},
        capture_output=True,
        text=True,
        timeout=590,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    value = json.loads(done.stdout)
    found = {one["name"]: one for one in value["checks"]}
    assert list(found) == [
        "environment",
        "precision",
        "master-trial",
        "visible-devices",
        "shared-device",
        "save",
        "system-metrics",
        "warm-start",
    ]
    assert {name: one["status"] for name, one in found.items()} == {
        **dict.fromkeys(found, "ok"),
        "visible-devices": "not applicable",
    }, done.stderr
    rows = found["precision"]["facts"]["configurations"]
    assert [(row["precision"], row["stage"]) for row in rows] == [
        (precision, stage) for precision in ("fp32", "bf16", "fp16") for stage in range(4)
    ]
    assert all(row["last_loss"] < row["first_loss"] for row in rows if row["precision"] != "fp16")
    assert "accelerator" in found["precision"]["not_shown"]
    assert found["master-trial"]["facts"]["state"] == "COMPLETED"
    assert found["shared-device"]["facts"]["named_after_s"] < 15
    assert found["save"]["facts"]["num_values"] > 100
    assert found["system-metrics"]["facts"]["metrics"]["memory"], found["system-metrics"]
    assert found["system-metrics"]["facts"]["ranks_of_telemetry"] == [2]
    assert found["warm-start"]["facts"]["greatest_difference"] == 0.0
    assert value["environment"]["accelerator"] == "cpu"
    (report,) = (tmp_path / "runs" / "doctor").glob("*/report.md")
    assert "COMPLETED" in report.read_text()
    assert not list(Path(report.parent).rglob("*.pt")), "checkpoints of checks are not kept"
