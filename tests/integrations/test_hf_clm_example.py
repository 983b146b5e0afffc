"""The example ``hf_clm`` under ``dstrial run``: trained, paused, resumed on another number of slots, and searched over."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from dstrial.cli.app import main as dstrial
from dstrial.testing.master import MasterForTest

pytest.importorskip("transformers")
pytestmark = [pytest.mark.ranks, pytest.mark.timeout(290)]

ROOT = Path(__file__).resolve().parents[2]
MODEL_DEF = ROOT / "model_defs" / "hf_clm"
SMALL = {"n_layer": 1, "n_embd": 32, "block_size": 16, "num_eval_blocks": 8, "num_chars_max": 30000}
DEADLINE_S = 250.0


def shortened(config: str, **flags: object) -> dict[str, Any]:
    """A shipped config with other values of its entrypoint's flags and a small model."""
    values: dict[str, Any] = yaml.safe_load((ROOT / "experiment_configs" / config).read_text())
    words = values["entrypoint"].split()
    for flag, value in flags.items():
        words[words.index(f"--{flag}") + 1] = str(value)
    values["entrypoint"] = " ".join(words)
    values["hyperparameters"] |= SMALL
    return values


def start(
    master: MasterForTest, directory: Path, config: dict[str, Any], *options: str
) -> subprocess.Popen[str]:
    path = directory / "experiment.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return subprocess.Popen(
        [sys.executable, "-m", "dstrial.cli", "run", str(path), str(MODEL_DEF), "--no-progress", *options],
        env={**master.env, "DSTRIAL_RUNS_DIR": str(directory / "runs"), "HF_HUB_OFFLINE": "1"},
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def reports(directory: Path) -> list[dict[str, Any]]:
    found = list(directory.glob("runs/*/*/metrics.jsonl"))
    return [json.loads(line) for line in found[0].read_text().splitlines()] if found else []


@pytest.mark.exhaustive(
    "tests/integrations/huggingface/test_core_init.py::test_a_plain_trainer_on_two_slots_is_paused_and_goes_on"
)
def test_the_example_is_paused_on_two_slots_and_goes_on_on_one(
    shared_master: MasterForTest, tmp_path: Path
) -> None:
    # Long enough to be interrupted in it, on a machine that is busy with something else too.
    length = 40
    config = shortened(
        "hf_clm_two_slots.yaml", max_steps=length, logging_steps=1, eval_steps=20, save_steps=1000
    )
    config["searcher"]["max_length"] = {"batches": length}
    process = start(shared_master, tmp_path, config)
    give_up_at_s = time.monotonic() + DEADLINE_S
    while not reports(tmp_path) and process.poll() is None and time.monotonic() < give_up_at_s:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGINT)
    printed, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130, printed
    num_before = len([row for row in reports(tmp_path) if row["group"] == "training"])
    assert 1 <= num_before < length

    process = start(shared_master, tmp_path, config, "--resume", "latest", "--slots", "1")
    printed, _ = process.communicate(timeout=DEADLINE_S)

    assert process.returncode == 0, printed
    training = [row for row in reports(tmp_path) if row["group"] == "training"]
    assert [row["steps_completed"] for row in training] == list(range(1, length + 1))
    assert all(math.isfinite(row["metrics"]["loss"]) for row in training)
    assert [row["steps_completed"] for row in reports(tmp_path) if row["group"] == "validation"] == [20, 40]
    assert not list(tmp_path.glob("runs/*/*/metrics.superseded.jsonl"))
    (record,) = tmp_path.glob("runs/*/*/run.json")
    assert json.loads(record.read_text())["state"] == "completed"
    metadata = [
        json.loads(path.read_text()) for path in tmp_path.glob("runs/*/*/checkpoints/*/metadata.json")
    ]
    by_step = {one["steps_completed"]: one["engines"][0] for one in metadata}
    assert by_step[length]["world_size"] == 1
    assert {engine["train_batch_size"] for engine in by_step.values()} == {8}

    (record,) = tmp_path.glob("runs/*/*/run.json")
    rewritten = tmp_path / "rewritten"
    asked = ["checkpoint", "reshape", str(record.parent), str(rewritten), "--slots", "1", "--zero-stage", "3"]
    ended = shared_master.dstrial(*asked, deadline_s=DEADLINE_S)
    assert ended.returncode == 0, ended.stderr
    assert dstrial(["checkpoint", "diff", str(record.parent), str(rewritten), "--only", "weights"]) == 0
    assert not (MODEL_DEF / "output").exists()


def test_the_searchs_early_stops_end_their_trials_as_completed(
    shared_master: MasterForTest, tmp_path: Path
) -> None:
    config = shortened("hf_clm_asha.yaml", max_steps=64, eval_steps=4, save_steps=1000)
    # One after the other: the second one's learning rate is a 20th of the first one's, and they are compared at batch 16.
    config["searcher"] |= {"max_time": 64, "num_rungs": 2, "max_trials": 2, "max_concurrent_trials": 1}
    config["reproducibility"] = {"experiment_seed": 25}
    process = start(shared_master, tmp_path, config)
    printed, _ = process.communicate(timeout=DEADLINE_S)

    assert process.returncode == 0, printed
    client = shared_master.client()
    newest = client.get("/api/v1/experiments?sortBy=SORT_BY_ID&orderBy=ORDER_BY_DESC&limit=1")["experiments"][
        0
    ]
    assert newest["state"] == "STATE_COMPLETED"
    trials = client.get(f"/api/v1/experiments/{newest['id']}/trials")["trials"]
    assert len(trials) == 2
    assert {trial["state"] for trial in trials} == {"STATE_COMPLETED"}
    batches = sorted(trial["totalBatchesProcessed"] for trial in trials)
    assert 16 <= batches[0] < batches[1] == 64
