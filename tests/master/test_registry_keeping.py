"""Registering, bundling and deleting of trained results, with real trials."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from det_here import DetHere
from determined.common import api
from determined.common.api import bindings
from determined.experimental import client
from submitting import config, submit, trials, wait_until
from waiting import wait_for

from dstrial.master.login import USERNAME, new_token
from dstrial.testing.master import MasterForTest

pytestmark = pytest.mark.process
ROOT = Path(__file__).resolve().parents[2]

TRAIN = """
import json, os, pathlib
import determined as det
with det.core.init(tensorboard_mode=det.core.TensorboardMode.MANUAL) as core:
    for step in range(1, 5):
        core.train.report_training_metrics(step, {"loss": 1 / step})
        core.train.report_validation_metrics(step, {"score": step})
        with core.checkpoint.store_path({"steps_completed": step}) as (path, _):
            (path / "weights.txt").write_text(str(step))
    path = core.train.get_tensorboard_path()
    path.mkdir(parents=True, exist_ok=True)
    (path / "events.out.tfevents.1").write_text("events")
    core.train.upload_tensorboard_files()
"""


@pytest.fixture
def session(shared_master: MasterForTest) -> api.Session:
    token = new_token(shared_master.record)
    return api.Session(shared_master.address, USERNAME, token, None)


@pytest.fixture
def det(shared_master: MasterForTest, session: api.Session, tmp_path: Path) -> DetHere:
    return DetHere(shared_master.address, USERNAME, session.token, tmp_path / "home")


def trained(master: MasterForTest, **changes: object) -> int:
    experiment_id = submit(master, config(**changes), TRAIN)
    wait_until(master, experiment_id, "COMPLETED")
    return experiment_id


def steps_left(session: api.Session, experiment_id: int) -> set[int]:
    found = client.Experiment(experiment_id, session).list_checkpoints()
    return {
        (one.metadata or {})["steps_completed"]
        for one in found
        if one.state is client.CheckpointState.COMPLETED
    }


def files_of_tensorboard(master: MasterForTest, experiment_id: int) -> list[Path]:
    # os.walk ignores directories that are deleted during the walk.
    return [
        Path(directory, name)
        for experiment in master.state.path.glob(f"checkpoints/*/tensorboard/experiment/{experiment_id}")
        for directory, _, names in os.walk(experiment)
        for name in names
        if ".tfevents" in name
    ]


def test_registered_checkpoints_survive_gc_policy_and_deletion(
    shared_master: MasterForTest, session: api.Session, det: DetHere
) -> None:
    keep = {"save_experiment_best": 0, "save_trial_best": 0, "save_trial_latest": 4}
    experiment_id = trained(shared_master, checkpoint_storage=keep)
    by_steps = {
        (one.metadata or {})["steps_completed"]: one
        for one in client.Experiment(experiment_id, session).list_checkpoints()
    }
    determined = client.Determined._from_session(session)
    version = determined.create_model(f"net-{experiment_id}").register_version(by_steps[2].uuid)

    numbers = ("--save-experiment-best", "0", "--save-trial-best", "0", "--save-trial-latest", "1")
    det.ok("e", "set", "gc-policy", *numbers, "--yes", str(experiment_id))
    wait_for(lambda: steps_left(session, experiment_id) == {2, 4}, "the policy")
    assert (shared_master.state.path / "checkpoints" / by_steps[2].uuid / "weights.txt").read_text() == "2"
    assert "is version 1 of model" in det.refused("checkpoint", "delete", "--yes", by_steps[2].uuid)
    assert "registered as" in det.refused("e", "delete", str(experiment_id), "--yes")

    version.delete()
    det.ok("e", "delete", str(experiment_id), "--yes")
    wait_for(lambda: "not found" in det.run("e", "describe", str(experiment_id)).stderr, "the deletion")
    assert not (shared_master.state.path / "checkpoints" / by_steps[2].uuid).exists()
    assert files_of_tensorboard(shared_master, experiment_id) == []


def test_tensorboard_files_are_deleted_without_checkpoints(
    shared_master: MasterForTest, session: api.Session, det: DetHere
) -> None:
    experiment_id, other_id = (submit(shared_master, config(), TRAIN) for _ in range(2))
    for one in (experiment_id, other_id):
        wait_until(shared_master, one, "COMPLETED")
    assert len(files_of_tensorboard(shared_master, experiment_id)) >= 1

    det.ok("e", "delete-tb-files", str(experiment_id))

    wait_for(lambda: not files_of_tensorboard(shared_master, experiment_id), "the deletion")
    assert len(files_of_tensorboard(shared_master, other_id)) >= 1
    assert steps_left(session, experiment_id) == {1, 4}
    running = submit(shared_master, config(), "import time; time.sleep(60)")
    assert "expected one that has ended" in det.refused("e", "delete-tb-files", str(running))
    det.ok("e", "kill", str(running))


def test_workspace_deletion_deletes_projects_and_experiments(
    shared_master: MasterForTest, session: api.Session, det: DetHere
) -> None:
    det.ok("workspace", "create", "doomed")
    project_id = json.loads(det.ok("project", "create", "doomed", "p", "--json"))["id"]
    experiment_id = trained(shared_master, workspace="doomed", project="p")
    checkpoint = client.Experiment(experiment_id, session).list_checkpoints()[0]
    det.ok("model", "create", f"of-{experiment_id}")
    det.ok("model", "register-version", f"of-{experiment_id}", checkpoint.uuid)
    assert "registered as" in det.refused("project", "delete", "doomed", "p", "--yes")
    det.ok("model", "delete", f"of-{experiment_id}")

    assert bindings.delete_DeleteWorkspace(
        session, id=bindings.get_GetProject(session, id=project_id).project.workspaceId
    )
    wait_for(lambda: "doomed" not in det.ok("workspace", "list"), "the deletion")
    assert "not found" in det.refused("e", "describe", str(experiment_id))
    assert not (shared_master.state.path / "checkpoints" / checkpoint.uuid).exists()


def test_support_bundle_contains_logs_and_descriptions(
    shared_master: MasterForTest, det: DetHere, tmp_path: Path
) -> None:
    experiment_id = trained(shared_master)
    (trial,) = trials(shared_master, experiment_id)

    text = det.ok("trial", "support-bundle", str(trial["id"]), "-o", str(tmp_path))

    with tarfile.open(text.strip().rpartition(" ")[2]) as bundle:
        found = {Path(one.name).name: bundle.extractfile(one).read().decode() for one in bundle}  # type: ignore[union-attr]
    assert set(found) == {
        "trial_logs.txt",
        "master_logs.txt",
        "api_trial_call.json",
        "api_experiment_call.json",
    }
    assert "Resources for Trial" in found["trial_logs.txt"]
    assert json.loads(found["api_trial_call.json"])["id"] == trial["id"]
    assert json.loads(found["api_experiment_call.json"])["experiment"]["id"] == experiment_id


def test_example_script_trains_registers_and_downloads(shared_master: MasterForTest, tmp_path: Path) -> None:
    context, settings = tmp_path / "context", tmp_path / "script.yaml"
    context.mkdir()
    (context / "train.py").write_text(TRAIN)
    searcher = {"name": "single", "metric": "score", "smaller_is_better": False}
    settings.write_text(json.dumps(config(searcher=searcher, checkpoint_storage={"save_trial_latest": 4})))
    words = [str(settings), str(context), "of a script", str(tmp_path / "best")]

    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "register_best.py"), *words],
        env={**shared_master.env, "PYTHONWARNINGS": "ignore"}, capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert "is version 1 of of a script: experiment " in done.stdout
    assert "{'score': 4}" in done.stdout
    assert (tmp_path / "best" / "weights.txt").read_text() == "4"
    assert f"{tmp_path / 'best' / 'weights.txt'} 1 bytes" in done.stdout
