"""The Accelerate example, interrupted as a user does it, goes on under the master with another number of slots."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_for

from dstrial.testing.master import MasterForTest

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "experiment_configs" / "accelerate_clm_two_slots.yaml"
DEFINITION = ROOT / "model_defs" / "accelerate_clm"
NUM_BATCHES = 40
DEADLINE_S = 200

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(
        importlib.util.find_spec("accelerate") is None, reason="Requires: [accelerate, transformers]"
    ),
]


def command(*arguments: str, runs_dir: Path) -> list[str]:
    values: dict[str, Any] = {
        "scheduling_unit": 1,
        "min_validation_period": {"batches": 20},
        "searcher.max_length": {"batches": NUM_BATCHES},
        "hyperparameters.num_chars_max": 60_000,
    }
    given = [word for key, value in values.items() for word in ("--config", f"{key}={json.dumps(value)}")]
    words = ["run", str(CONFIG), str(DEFINITION), *given, "--runs-dir", str(runs_dir), *arguments]
    return [sys.executable, "-m", "dstrial.cli", *words]


def reports(runs_dir: Path, group: str = "training") -> list[dict[str, Any]]:
    found = list(runs_dir.glob("*/*/metrics.jsonl"))
    lines = found[0].read_text().splitlines() if found else []
    return [row for row in map(json.loads, lines) if row["group"] == group]


def test_interrupted_on_two_slots_it_goes_on_with_one(shared_master: MasterForTest, tmp_path: Path) -> None:
    env = {**os.environ, **shared_master.env}
    with subprocess.Popen(
        command(runs_dir=tmp_path), env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as first:
        wait_for(lambda: len(reports(tmp_path)) >= 3 or first.poll() is not None, deadline_s=DEADLINE_S)
        first.send_signal(signal.SIGINT)
        output, _ = first.communicate(timeout=DEADLINE_S)
    stopped_at = len(reports(tmp_path))
    assert 3 <= stopped_at < NUM_BATCHES, output
    (record,) = tmp_path.glob("*/*/run.json")
    assert json.loads(record.read_text())["state"] == "stopped", output

    second = subprocess.run(
        command("--resume", "latest", "--slots", "1", runs_dir=tmp_path),
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )

    assert second.returncode == 0, second.stdout
    assert json.loads(record.read_text())["state"] == "completed"
    # No batch is trained twice or left out, and what was learned before is not lost.
    assert [row["steps_completed"] for row in reports(tmp_path)] == list(range(1, NUM_BATCHES + 1))
    assert not list(tmp_path.glob("*/*/metrics.superseded.jsonl"))
    losses = [row["metrics"]["loss"] for row in reports(tmp_path)]
    assert losses[stopped_at] == pytest.approx(losses[stopped_at - 1], abs=0.4)
    assert losses[-1] < losses[0] - 0.5
    assert [row["steps_completed"] for row in reports(tmp_path, "validation")] == [20, 40]
