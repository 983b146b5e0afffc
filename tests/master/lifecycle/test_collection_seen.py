"""A script that waits for the collection of checkpoints, as Determined's own end-to-end tests do."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from det_here import DetHere
from determined.common import api
from determined.common.api import bindings
from submitting import config, submit, wait_until

from dstrial.master.login import USERNAME, new_token
from dstrial.testing.master import MasterForTest

pytestmark = pytest.mark.process

# Determined 0.38.1, e2e_tests/tests/experiment: how often and for how long `wait_for_gc_to_finish` looks.
PERIOD_S, DEADLINE_S = 0.5, 60.0


def test_a_collection_appears_among_the_tasks_and_goes(shared_master: MasterForTest, tmp_path: Path) -> None:
    det = DetHere.at(shared_master, tmp_path)
    det.ok("task", "list")  # a first command takes longer than a collection is shown
    session = api.Session(shared_master.address, USERNAME, new_token(shared_master.record), None)
    given = config(hyperparameters={"steps": 6}, checkpoint_storage={"save_trial_latest": 1})
    experiment_id = submit(shared_master, given)
    name = f"Checkpoint GC (Experiment {experiment_id})"
    listed, is_seen, give_up_at_s = "", False, time.monotonic() + DEADLINE_S
    while True:
        names = [
            task["name"] for task in session.get("api/v1/tasks").json()["allocationIdToSummary"].values()
        ]
        if name in names and not is_seen:
            is_seen, listed = True, det.ok("task", "list")
        elif name not in names and is_seen:
            break
        assert time.monotonic() < give_up_at_s, names
        time.sleep(PERIOD_S)

    wait_until(shared_master, experiment_id, "COMPLETED")
    assert name in listed
    found = bindings.get_GetExperimentCheckpoints(session, id=experiment_id).checkpoints
    deleted = [one for one in found if one.state == bindings.checkpointv1State.DELETED]
    assert len(found) == 3
    assert len(deleted) >= 1
    assert all("state.json" in one.resources for one in deleted)


def test_many_experiments_are_killed_whatever_their_project(shared_master: MasterForTest) -> None:
    session = api.Session(shared_master.address, USERNAME, new_token(shared_master.record), None)
    ids = [submit(shared_master, config("sleep 300"), "", activate=False) for _ in range(2)]

    body = bindings.v1KillExperimentsRequest(experimentIds=ids, projectId=-1)
    results = bindings.post_KillExperiments(session, body=body, projectId=-1).results

    assert {one.id: one.error for one in results} == dict.fromkeys(ids, "")
    for experiment_id in ids:
        wait_until(shared_master, experiment_id, "CANCELED")
