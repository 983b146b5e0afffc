"""Responses that end-to-end tests of Determined 0.38.1 check."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
import yaml
from det_here import DetHere
from determined.common import api
from determined.common.api import bindings
from serving import Master

from dstrial.master.store import checkpoints

pytestmark = pytest.mark.process

CONFIG = {
    "name": "c",
    "entrypoint": "python3 train.py",
    "searcher": {"name": "single", "metric": "loss"},
    "hyperparameters": {},
}


def test_feature_switches_are_empty_lists(fresh_master: Master, admin: api.Session) -> None:
    assert bindings.get_GetMasterConfig(admin).config["feature_switches"] == []
    assert list(bindings.get_GetMaster(admin).featureSwitches or []) == []


def test_experiment_has_trial_ids_and_external_ids(fresh_master: Master, session: api.Session) -> None:
    fresh_master.change("UPDATE experiments SET external_id = 'mine' WHERE id = 1")
    fresh_master.change("UPDATE trials SET external_id = 'first' WHERE id = 1")

    found = bindings.get_GetExperiment(session, experimentId=1).experiment

    assert list(found.trialIds or []) == [1]
    assert (found.externalExperimentId, found.externalTrialId) == ("mine", "first")
    assert found.displayName == found.username == "determined"
    listed = bindings.get_GetExperiments(session).experiments
    assert {one.displayName for one in listed} == {"determined"}


def test_experiment_needs_no_model_definition(det: DetHere, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(CONFIG))

    assert "Created experiment 3" in det.ok("e", "create", str(tmp_path / "c.yaml"), "--paused")

    # A model definition must contain the file of the entrypoint.
    (tmp_path / "context").mkdir()
    (tmp_path / "context" / "other.py").touch()
    text = det.refused("e", "create", str(tmp_path / "c.yaml"), str(tmp_path / "context"))
    assert "train.py, which is not in the model definition" in text


def test_command_needs_no_entrypoint(session: api.Session) -> None:
    body = bindings.v1LaunchCommandRequest(config={"resources": {"slots": 0}})

    command = bindings.post_LaunchCommand(session, body=body).command

    assert command.state == bindings.taskv1State.QUEUED


def test_allocations_csv_keeps_workspace_at_start(fresh_master: Master, session: api.Session) -> None:
    """Experiment 1 moves to another workspace; a task has no experiment ID."""
    fresh_master.change("UPDATE allocations SET workspace_name = 'Uncategorized' WHERE trial_id > 0")
    workspace = bindings.post_PostWorkspace(
        session, body=bindings.v1PostWorkspaceRequest(name="later")
    ).workspace
    project = bindings.post_PostProject(
        session,
        workspaceId=workspace.id,
        body=bindings.v1PostProjectRequest(name="p", workspaceId=workspace.id),
    ).project
    fresh_master.change("UPDATE experiments SET project_id = ? WHERE id = 1", project.id)
    body = bindings.v1LaunchCommandRequest(config={"entrypoint": ["true"]}, workspaceId=workspace.id)
    command = bindings.post_LaunchCommand(session, body=body).command
    fresh_master.change(
        "INSERT INTO allocations (id, task_id, trial_id, experiment_id, run_id, state, slots, ports, resources_id, "
        "directory, start_us, workspace_name) VALUES ('c.1', ?, 0, 0, 1, 'RUNNING', '[]', '{}', 'r', '/x', 5, 'later')",
        command.id,
    )
    query = "timestampAfter=1970-01-01T00:00:00Z&timestampBefore=2100-01-01T00:00:00Z"

    text = session.get(f"resources/allocation/allocations-csv?{query}").text

    rows = {row["allocation_id"]: row for row in csv.DictReader(io.StringIO(text))}
    assert (rows["1.request.1"]["workspace_name"], rows["1.request.1"]["experiment_id"]) == (
        "Uncategorized",
        "1",
    )
    assert (rows["c.1"]["workspace_name"], rows["c.1"]["experiment_id"]) == ("later", "")


def test_task_config_equals_submitted_config(det: DetHere, tmp_path: Path) -> None:
    given = {"entrypoint": ["echo", "hi"], "resources": {"slots": 0}, "environment": {"image": "some/image"}}
    (tmp_path / "task.yaml").write_text(yaml.safe_dump(given))
    made = det.ok("task", "create", str(tmp_path / "task.yaml")).split()
    task_id = made[made.index("task") + 1]

    assert yaml.safe_load(det.ok("task", "config", task_id)) == given

    forked = det.ok("task", "fork", task_id).split()
    assert yaml.safe_load(det.ok("task", "config", forked[forked.index("task") + 1])) == given


def test_ended_task_cannot_be_killed(det: DetHere, tmp_path: Path) -> None:
    (tmp_path / "task.yaml").write_text("entrypoint: [sleep, '9']\nresources: {slots: 0}\n")
    made = det.ok("task", "create", str(tmp_path / "task.yaml")).split()
    task_id = made[made.index("task") + 1]
    det.ok("task", "kill", task_id)

    assert "is CANCELED; expected one that has not ended" in det.refused("task", "kill", task_id)


def test_deleted_checkpoint_keeps_file_list(fresh_master: Master, session: api.Session) -> None:
    uuid = fresh_master.checkpoints[1]

    fresh_master.services.database.write(lambda tx: checkpoints.set_resources(tx, uuid, {}))

    found = bindings.get_GetCheckpoint(session, checkpointUuid=uuid).checkpoint
    assert found.state == bindings.checkpointv1State.DELETED
    assert found.resources == {"a": "1"}
    trial = bindings.get_GetTrial(session, trialId=1).trial
    assert (trial.checkpointCount, trial.totalCheckpointSize) == (0, "0")
