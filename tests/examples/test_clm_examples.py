"""The examples hf_clm and accelerate_clm: interrupted, resumed and searched."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from waiting import wait_for

from dstrial.testing.master import MasterForTest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytestmark = [pytest.mark.ranks, pytest.mark.timeout(290)]

ROOT = Path(__file__).resolve().parents[2]
NUM_BATCHES = 40
DEADLINE_S = 250
SMALL = {"n_layer": 1, "n_embd": 32, "block_size": 16, "num_eval_blocks": 8, "num_chars_max": 30000}


def accelerate_clm() -> dict[str, Any]:
    config = shipped("accelerate_clm_two_slots")
    config["searcher"]["max_length"] = {"batches": NUM_BATCHES}
    config["hyperparameters"]["num_chars_max"] = 60_000
    return {**config, "scheduling_unit": 1, "min_validation_period": {"batches": 20}}


def hf_clm() -> dict[str, Any]:
    config = shipped(
        "hf_clm_two_slots", max_steps=NUM_BATCHES, logging_steps=1, eval_steps=20, save_steps=1000
    )
    config["searcher"]["max_length"] = {"batches": NUM_BATCHES}
    config["hyperparameters"] |= SMALL
    return config


def shipped(name: str, **flags: object) -> dict[str, Any]:
    """Return a shipped config with other values for flags of its entrypoint."""
    config: dict[str, Any] = yaml.safe_load((ROOT / "experiment_configs" / f"{name}.yaml").read_text())
    words = config["entrypoint"].split()
    for flag, value in flags.items():
        words[words.index(f"--{flag}") + 1] = str(value)
    return {**config, "entrypoint": " ".join(words)}


def start(
    master: MasterForTest, directory: Path, definition: str, config: dict[str, Any], *options: str
) -> subprocess.Popen[str]:
    path = directory / "experiment.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    words = ["run", str(path), str(ROOT / "model_defs" / definition), *options]
    return subprocess.Popen(
        [sys.executable, "-m", "dstrial.cli", *words],
        env={**os.environ, **master.env, "DSTRIAL_RUNS_DIR": str(directory / "runs"), "HF_HUB_OFFLINE": "1"},
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def reports(directory: Path, group: str = "training") -> list[dict[str, Any]]:
    found = list(directory.glob("runs/*/*/metrics.jsonl"))
    lines = found[0].read_text().splitlines() if found else []
    return [row for row in map(json.loads, lines) if row["group"] == group]


@pytest.mark.parametrize("make", [accelerate_clm, hf_clm], ids=["accelerate_clm", "hf_clm"])
def test_interrupted_example_resumes_on_other_slots(
    shared_master: MasterForTest, tmp_path: Path, make: Any
) -> None:
    definition = make.__name__
    first = start(shared_master, tmp_path, definition, make())
    wait_for(lambda: len(reports(tmp_path)) >= 3 or first.poll() is not None, deadline_s=DEADLINE_S)
    first.send_signal(signal.SIGINT)
    printed, _ = first.communicate(timeout=DEADLINE_S)
    assert first.returncode == 130, printed
    stopped_at = len(reports(tmp_path))
    assert 3 <= stopped_at < NUM_BATCHES, printed
    (record,) = tmp_path.glob("runs/*/*/run.json")
    assert json.loads(record.read_text())["state"] == "stopped", printed

    second = start(shared_master, tmp_path, definition, make(), "--resume", "latest", "--slots", "1")
    printed, _ = second.communicate(timeout=DEADLINE_S)

    assert second.returncode == 0, printed
    assert json.loads(record.read_text())["state"] == "completed"
    # No batch is trained twice or skipped, and the loss continues where the interrupted run left it.
    assert [row["steps_completed"] for row in reports(tmp_path)] == list(range(1, NUM_BATCHES + 1))
    assert not list(tmp_path.glob("runs/*/*/metrics.superseded.jsonl"))
    losses = [row["metrics"]["loss"] for row in reports(tmp_path)]
    assert losses[stopped_at] == pytest.approx(losses[stopped_at - 1], abs=0.4)
    assert losses[-1] < losses[0] - (0.5 if definition == "accelerate_clm" else 0)
    assert [row["steps_completed"] for row in reports(tmp_path, "validation")] == [20, 40]
    metadata = [
        json.loads(path.read_text()) for path in tmp_path.glob("runs/*/*/checkpoints/*/metadata.json")
    ]
    by_step = {one["steps_completed"]: one["engines"][0] for one in metadata}
    assert by_step[NUM_BATCHES]["world_size"] == 1
    assert len({engine["train_batch_size"] for engine in by_step.values()}) == 1
    assert not (ROOT / "model_defs" / definition / "output").exists()


def test_trainer_search_ends_stopped_trials_as_completed(
    shared_master: MasterForTest, tmp_path: Path
) -> None:
    config = shipped("hf_clm_asha", max_steps=64, eval_steps=4, save_steps=1000)
    config["hyperparameters"] |= SMALL
    # Trials run one after the other; the second has 1/20 of the first's learning rate and is compared at batch 16.
    config["searcher"] |= {"max_time": 64, "num_rungs": 2, "max_trials": 2, "max_concurrent_trials": 1}
    config["reproducibility"] = {"experiment_seed": 25}
    process = start(shared_master, tmp_path, "hf_clm", config)
    printed, _ = process.communicate(timeout=DEADLINE_S)

    assert process.returncode == 0, printed
    client = shared_master.client()
    newest = "/api/v1/experiments?sortBy=SORT_BY_ID&orderBy=ORDER_BY_DESC&limit=1"
    (experiment,) = client.get(newest)["experiments"]
    assert experiment["state"] == "STATE_COMPLETED"
    trials = client.get(f"/api/v1/experiments/{experiment['id']}/trials")["trials"]
    assert [trial["state"] for trial in trials] == ["STATE_COMPLETED"] * 2
    batches = sorted(trial["totalBatchesProcessed"] for trial in trials)
    assert 16 <= batches[0] < batches[1] == 64
