"""A stuck scheduler is reported; forged files of trials do not block it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator

import pytest
from serving import Master
from submitting import config, submit, trials, wait_until
from waiting import wait_for

from dstrial.master.scheduler.scheduler import Scheduler
from dstrial.testing.master import MasterForTest, master_for_test

pytestmark = pytest.mark.process


def test_health_reports_stuck_scheduler(fresh_master: Master) -> None:
    services = fresh_master.services
    assert fresh_master.get("/health", None).status == 200

    services.scheduler_step = "looking after allocation 1.x.1", time.monotonic() - 31

    answer = fresh_master.get("/health", None)
    assert answer.status == 503
    assert "has been looking after allocation 1.x.1 for 31 s" in answer.error
    assert fresh_master.get("/page/session").json["damage"] == answer.error
    scheduler = Scheduler(services)
    with contextlib.ExitStack() as stack:
        scheduler.start()
        stack.callback(scheduler.stop, graceful=False, timeout_s=0)
        wait_for(lambda: fresh_master.get("/health", None).status == 200)


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MasterForTest]:
    with master_for_test(tmp_path_factory.mktemp("master"), num_slots=4) as running:
        yield running


def test_trials_with_forged_files_can_be_killed(master: MasterForTest) -> None:
    forgeries = ("mkfifo exit.json", "echo {} > exit.json", "rm output.log; mkfifo output.log")
    forging = [
        submit(master, config(f"cd $DSTRIAL_ALLOCATION_DIR && {one}; touch workdir/forged; sleep 600"))
        for one in forgeries
    ]
    wait_for(lambda: len(list(master.state.allocations_path.glob("*/workdir/forged"))) == len(forging))
    wait_until(master, submit(master, config("python3 train.py")), "COMPLETED")
    for one in forging:
        assert [trial["state"] for trial in trials(master, one)] == ["STATE_RUNNING"]
        master.client().post(f"/api/v1/experiments/{one}/kill")
        wait_until(master, one, "CANCELED")
    assert json.loads(master.dstrial("status", "--json").stdout)["trouble"] == ""


def test_kill_with_stopped_supervisor_ends_trial(master: MasterForTest) -> None:
    experiment_id = submit(master, config("python3 train.py", hyperparameters={"steps": 600, "sleep": 0.1}))
    wait_for(lambda: any(one.get("totalBatchesProcessed") for one in trials(master, experiment_id)))
    (trial,) = trials(master, experiment_id)
    wait_for(lambda: len(list(master.state.allocations_path.iterdir())) == 1)
    (path,) = master.state.allocations_path.glob("*/supervisor.json")
    os.kill(int(json.loads(path.read_text())["pid"]), signal.SIGSTOP)

    killed = master.det("trial", "kill", str(trial["id"]))

    assert killed.returncode == 0, killed.stdout + killed.stderr
    wait_for(lambda: [one["state"] for one in trials(master, experiment_id)] == ["STATE_CANCELED"])
