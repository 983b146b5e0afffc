"""Stalled trials on a master: log, ``dstrial status``, web page, restart, pause."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from small_runs import deepspeed_config, experiment, submit
from waiting import wait_for

from dstrial.master.client import Client
from dstrial.testing.master import MasterForTest, master_for_test

pytestmark = [pytest.mark.ranks, pytest.mark.process]


def stalling_config(
    tmp_path: Path,
    *,
    action: str,
    max_restarts: int = 0,
    timeout: int = 600,
    validate: int = 1000,
    trial: str = "StoppedTrial",
    **hparams: Any,
) -> dict[str, Any]:
    """Return the config of a trial whose two ranks stall."""
    given = {
        "deepspeed_config": deepspeed_config(1),
        "stall_at": 5,
        "pid_file": str(tmp_path / "pids"),
        **hparams,
    }
    config: dict[str, Any] = experiment(
        given,
        batches=40,
        report=5,
        validate=validate,
        checkpoint=1000,
        entrypoint=f"python3 -m dstrial.launch --trial stalling_trials:{trial}",
        resources={"slots_per_trial": 2},
        max_restarts=max_restarts,
        data={"dstrial": {"stall_timeout": timeout, "stall_action": action}},
    )
    return config


def create(master: MasterForTest, tmp_path: Path, **fields: Any) -> int:
    """Submit the trial of ``stalling_config``; return its id."""
    experiment_id = submit(master, tmp_path, stalling_config(tmp_path, **fields))
    client = master.client()
    wait_for(lambda: client.get(f"/api/v1/experiments/{experiment_id}/trials")["trials"])
    return int(client.get(f"/api/v1/experiments/{experiment_id}/trials")["trials"][0]["id"])


def trial_of(client: Client, trial_id: int) -> dict[str, Any]:
    found: dict[str, Any] = client.get(f"/api/v1/trials/{trial_id}")["trial"]
    return found


def stall_on_page(client: Client, trial_id: int) -> str:
    return str(client.get(f"/page/trials/{trial_id}")["trial"]["stall"])


def stalls_in_status(master: MasterForTest, trial_id: int) -> list[str]:
    fields = json.loads(master.dstrial("status", "--json").stdout)
    return [one["text"] for one in fields["stalled"] if one["trial"] == trial_id]


def test_stopped_rank_is_shown_until_it_continues(shared_master: MasterForTest, tmp_path: Path) -> None:
    client = shared_master.client()
    trial_id = create(shared_master, tmp_path, action="report")
    wait_for(lambda: stall_on_page(client, trial_id), deadline_s=180)
    (text,) = stalls_in_status(shared_master, trial_id)
    assert text.startswith("rank 1 is stopped (SIGSTOP) at batch 5 in train_batch; rank 0 waits for it in a")
    assert f"stalled:     trial {trial_id} of experiment " in shared_master.dstrial("status").stdout
    log = shared_master.det("trial", "logs", str(trial_id)).stdout
    assert f"stalled: {text}." in log
    assert "stalled: stack of rank 0" in log
    assert stall_on_page(client, trial_id) == text
    os.kill(int((tmp_path / "pids").read_text()), signal.SIGCONT)
    wait_for(lambda: trial_of(client, trial_id)["state"].endswith("COMPLETED"), deadline_s=120)
    assert stalls_in_status(shared_master, trial_id) == []
    assert stall_on_page(client, trial_id) == ""
    assert "stalled: no longer" in shared_master.det("trial", "logs", str(trial_id)).stdout


def test_stalled_trial_restarts_once_if_configured(shared_master: MasterForTest, tmp_path: Path) -> None:
    client = shared_master.client()
    trial_id = create(shared_master, tmp_path, action="restart", max_restarts=2)
    wait_for(lambda: trial_of(client, trial_id)["state"].endswith("COMPLETED"), deadline_s=240)
    assert trial_of(client, trial_id)["restarts"] == 1
    log = shared_master.det("trial", "logs", str(trial_id)).stdout
    assert "stalled: the ranks are ended, as data.dstrial.stall_action says" in log
    assert "rank 1 failed first" in log


def test_pause_of_stalled_ranks_frees_their_slots(shared_master: MasterForTest, tmp_path: Path) -> None:
    client = shared_master.client()
    trial_id = create(shared_master, tmp_path, action="report")
    wait_for(lambda: stall_on_page(client, trial_id), deadline_s=180)
    experiment_id = trial_of(client, trial_id)["experimentId"]
    client.post(f"/api/v1/experiments/{experiment_id}/pause")
    wait_for(lambda: not client.get("/api/v1/tasks")["allocationIdToSummary"], deadline_s=90)
    log = shared_master.det("trial", "logs", str(trial_id)).stdout
    assert (
        "killing allocation: it did not stop within 30 s, and rank 1 is stopped (SIGSTOP) at batch 5" in log
    )
    assert trial_of(client, trial_id)["state"].endswith("PAUSED")
    client.post(f"/api/v1/experiments/{experiment_id}/kill")


def test_pause_before_first_batch_ends_ranks_immediately(
    shared_master: MasterForTest, tmp_path: Path
) -> None:
    client = shared_master.client()
    trial_id = create(
        shared_master, tmp_path, action="report", trial="SlowFirstBatchTrial", first_batch_s=600
    )
    told = "training the first batch"
    wait_for(lambda: told in shared_master.dstrial("status").stdout, deadline_s=180)
    experiment_id = trial_of(client, trial_id)["experimentId"]
    client.post(f"/api/v1/experiments/{experiment_id}/pause")
    wait_for(lambda: not client.get("/api/v1/tasks")["allocationIdToSummary"], deadline_s=25)
    log = shared_master.det("trial", "logs", str(trial_id)).stdout
    assert f"killing allocation: it was asked to stop before its first batch ({told})" in log
    assert trial_of(client, trial_id)["state"].endswith("PAUSED")
    assert trial_of(client, trial_id)["restarts"] == 0
    client.post(f"/api/v1/experiments/{experiment_id}/kill")


def test_stopped_master_is_reported_and_ends_no_rank(tmp_path: Path) -> None:
    with master_for_test(tmp_path, num_slots=2) as master:
        trial_id = create(
            master,
            tmp_path,
            action="restart",
            max_restarts=1,
            timeout=2,
            validate=6,  # reports are asynchronous, only a validation waits for the master
            stall_at=10_000,
            batch_sleep_s=0.25,
        )
        client = master.client()
        # The first validation and checkpoint count as stalled much later; both have ended by batch 12.
        wait_for(lambda: trial_of(client, trial_id).get("totalBatchesProcessed", 0) >= 12, deadline_s=120)
        (log,) = master.state.allocations_path.glob("*/output.log")
        os.kill(master.record.pid, signal.SIGSTOP)
        try:
            # The stall timeout grows with the longest batch, which may be long on a busy machine.
            told = "stalled: rank 0 waits for a response of the master"
            wait_for(lambda: told in log.read_text(), told, deadline_s=150)
            shown = master.dstrial("status")
            assert shown.returncode == 1
            assert f"process {master.record.pid} is stopped (SIGSTOP)" in shown.stdout
        finally:
            os.kill(master.record.pid, signal.SIGCONT)
        wait_for(lambda: trial_of(client, trial_id)["state"].endswith("COMPLETED"), deadline_s=120)
        assert trial_of(client, trial_id)["restarts"] == 0
