"""Helpers that submit experiments without torch to a real master and poll them."""

from __future__ import annotations

import base64
import os
import time
from pathlib import Path
from typing import Any

import yaml
from waiting import sleep_a_little

from dstrial.master.client import Client
from dstrial.testing.master import MasterForTest

# Key: address, pid and start time of the master process.
_clients: dict[tuple[str, int, str], Client] = {}

TRAIN = """
import json, os, pathlib, sys, time
import determined as det

def main():
    info = det.get_cluster_info()
    hparams = info.trial.hparams
    with det.core.init(tensorboard_mode=det.core.TensorboardMode.MANUAL) as core:
        step = 0
        if info.latest_checkpoint is not None:
            with core.checkpoint.restore_path(info.latest_checkpoint) as path:
                step = json.loads((path / "state.json").read_text())
        while step < hparams.get("steps", 6):
            step += 1
            if hparams.get("fails_at") == step and info.trial._trial_run_id <= hparams.get("failing_runs", 99):
                raise RuntimeError(f"step {step} went wrong")
            if hparams.get("invalid"):
                raise det.InvalidHP("not these")
            time.sleep(hparams.get("sleep", 0.0))
            core.train.report_training_metrics(step, {"loss": 1.0 / step})
            core.train.report_validation_metrics(step, {"score": hparams.get("score", 0.5) / step, "batches": step})
            if step % 2 == 0 or core.preempt.should_preempt():
                with core.checkpoint.store_path({"steps_completed": step}) as (path, _):
                    (path / "state.json").write_text(json.dumps(step))
            if core.preempt.should_preempt():
                print("asked to stop at", step)
                return
        print("finished at", step)

main()
"""


def config(entrypoint: Any = "python3 train.py", **changes: Any) -> dict[str, Any]:
    return {
        "name": "life",
        "entrypoint": entrypoint,
        "hyperparameters": {},
        "searcher": {"name": "single", "metric": "score"},
        "max_restarts": 0,
        **changes,
    }


def submit(master: MasterForTest, given: dict[str, Any], script: str = TRAIN, **body: Any) -> int:
    file = {
        "path": "train.py",
        "type": 48,
        "content": base64.b64encode(script.encode()).decode(),
        "mtime": "0",
        "mode": 420,
    }
    message = {"activate": True, "config": yaml.safe_dump(given), "modelDefinition": [file], **body}
    return int(master.client().post("/api/v1/experiments", message)["experiment"]["id"])


def client_of(master: MasterForTest) -> Client:
    """Return a cached client, so that polling does not log in for each request."""
    record = master.record
    key = (record.address, record.pid, record.start_time)
    if key not in _clients:
        _clients[key] = master.client()
    return _clients[key]


def experiment(master: MasterForTest, experiment_id: int) -> dict[str, Any]:
    found: dict[str, Any] = client_of(master).get(f"/api/v1/experiments/{experiment_id}")["experiment"]
    return found


def trials(master: MasterForTest, experiment_id: int) -> list[dict[str, Any]]:
    answer = client_of(master).get(f"/api/v1/experiments/{experiment_id}/trials")
    found: list[dict[str, Any]] = answer["trials"]
    return found


def wait_until(
    master: MasterForTest, experiment_id: int, *states: str, deadline_s: float = 60.0
) -> dict[str, Any]:
    began_s = time.monotonic()
    give_up_at_s = began_s + deadline_s
    while True:
        found = experiment(master, experiment_id)
        if found["state"].removeprefix("STATE_") in states:
            return found
        if time.monotonic() > give_up_at_s or found["endTime"] is not None:
            raise AssertionError(f"{found['state']}\n{log_of(master, experiment_id)}")
        sleep_a_little(began_s)


def log_of(master: MasterForTest, experiment_id: int) -> str:
    client = client_of(master)
    return "".join(
        line["message"]
        for trial in trials(master, experiment_id)
        for line in client.stream(f"/api/v1/trials/{trial['id']}/logs")
    )


def reports_of(master: MasterForTest, trial_id: int, group: str = "training") -> list[dict[str, Any]]:
    """Return a trial's metric reports of a group, in batch order."""
    path = f"/api/v1/trials/metrics/trial_metrics?group={group}&trialIds={trial_id}"
    return [report for line in client_of(master).stream(path) for report in line["metrics"]]


def steps_of(master: MasterForTest, trial_id: int) -> list[int]:
    return [report["totalBatches"] for report in reports_of(master, trial_id)]


def checkpoints_of(master: MasterForTest, experiment_id: int) -> list[dict[str, Any]]:
    """Return an experiment's checkpoints in any state."""
    answer = client_of(master).get(f"/api/v1/experiments/{experiment_id}/checkpoints")
    found: list[dict[str, Any]] = answer["checkpoints"]
    return found


def agent_of(master: MasterForTest) -> str:
    """Return the id of the only agent."""
    (agent,) = client_of(master).get("/api/v1/agents")["agents"]
    return str(agent["id"])


def processes_with(text: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if text.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found
