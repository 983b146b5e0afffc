"""A trial whose supervisor is stopped by SIGSTOP."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from submitting import config, submit, trials
from waiting import wait_for

from dstrial.testing.master import MasterForTest, master_for_test

pytestmark = pytest.mark.process


def supervisor_of(master: MasterForTest) -> int:
    """Return the process id of the supervisor of the only trial that runs."""
    wait_for(lambda: list(master.state.allocations_path.glob("*/supervisor.json")))
    (path,) = master.state.allocations_path.glob("*/supervisor.json")
    return int(json.loads(path.read_text())["pid"])


def begun(master: MasterForTest) -> tuple[int, int]:
    """Return a trial of the first experiment that runs, and the process id of its supervisor."""
    experiment_id = submit(master, config("python3 train.py", hyperparameters={"steps": 600, "sleep": 0.1}))
    wait_for(lambda: any(trial.get("totalBatchesProcessed") for trial in trials(master, experiment_id)))
    (trial,) = trials(master, experiment_id)
    return int(trial["id"]), supervisor_of(master)


def test_kill_stopped_supervisor_ends_the_trial(tmp_path: Path) -> None:
    with master_for_test(tmp_path, num_slots=1) as master:
        trial_id, pid = begun(master)
        os.kill(pid, signal.SIGSTOP)
        killed = master.det("trial", "kill", str(trial_id))
        assert killed.returncode == 0, killed.stdout + killed.stderr
        client = master.client()
        wait_for(
            lambda: client.get(f"/api/v1/trials/{trial_id}")["trial"]["state"].endswith("CANCELED"),
            "the trial does not end",
        )
