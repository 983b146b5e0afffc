"""Checkpoint storage that disappears, such as an unmounted NFS, and returns."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from submitting import checkpoints_of, config, experiment, log_of, submit, trials, wait_until
from waiting import wait_for

from dstrial.master.store.views.observe import num_pending_jobs
from dstrial.storage_guard import STORAGE_MARKER
from dstrial.testing.master import MasterForTest, master_for_test

pytestmark = pytest.mark.process

# Saves at every step, pauses between two saves while the file ``hold`` exists, ends if the file ``last`` exists.
SAVING = """
import json, os, pathlib, sys, time
import determined as det

info = det.get_cluster_info()
last = pathlib.Path(info.trial.hparams["last"])
hold, held = last.with_name("hold"), last.with_name("held")
with det.core.init(tensorboard_mode=det.core.TensorboardMode.MANUAL) as core:
    step = 0
    if info.latest_checkpoint is not None:
        with core.checkpoint.restore_path(info.latest_checkpoint) as path:
            step = json.loads((path / "state.json").read_text())
    while not last.exists():
        while hold.exists():
            held.touch()
            time.sleep(0.01)
        step += 1
        core.train.report_training_metrics(step, {"loss": 1.0 / step})
        with core.checkpoint.store_path({"steps_completed": step}) as (path, _):
            # As DeepSpeed does.
            os.makedirs(path / "model", exist_ok=True)
            time.sleep(0.02)
            (path / "model" / "weights").write_text("x" * 1000)
            (path / "state.json").write_text(json.dumps(step))
    core.train.report_validation_metrics(step, {"score": 0.5})
"""
# Also uploads TensorBoard files to the storage, which requires torch.
SAVING_EVENTS = SAVING.replace("MANUAL", "AUTO")


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MasterForTest]:
    with master_for_test(tmp_path_factory.mktemp("master"), num_slots=2) as running:
        yield running


def saving(tmp_path: Path, storage: Path, **changes: Any) -> dict[str, Any]:
    kept = {"save_trial_latest": 10_000, "save_trial_best": 0, "save_experiment_best": 0}
    return config(
        hyperparameters={"last": str(tmp_path / "last")},
        checkpoint_storage={"type": "shared_fs", "host_path": str(storage), **kept},
        **changes,
    )


def lost(master: MasterForTest, experiment_id: int, storage: Path) -> list[str]:
    """Return uuids of COMPLETED checkpoints, one per missing or wrongly sized file."""
    rows = [one for one in checkpoints_of(master, experiment_id) if one["state"].endswith("COMPLETED")]
    assert rows
    return [
        one["uuid"]
        for one in rows
        for name, size in one["resources"].items()
        if not name.endswith("/")
        and not (
            (storage / one["uuid"] / name).is_file()
            and (storage / one["uuid"] / name).stat().st_size == int(size)
        )
    ]


def half_written(master: MasterForTest, experiment_id: int, storage: Path) -> set[str]:
    known = {one["uuid"] for one in checkpoints_of(master, experiment_id)}
    return {path.name for path in storage.glob("*-*-*-*-*") if (path / "model").exists()} - known


@contextlib.contextmanager
def between_saves(tmp_path: Path) -> Iterator[None]:
    """Pause a trial between two saves: no save is in progress within the block."""
    (tmp_path / "hold").touch()
    wait_for((tmp_path / "held").exists)
    yield
    (tmp_path / "held").unlink()
    (tmp_path / "hold").unlink()


def unmount(storage: Path, tmp_path: Path, *, leaves_mount_point: bool = False) -> None:
    with between_saves(tmp_path):
        storage.rename(storage.with_name("away"))
        if leaves_mount_point:
            storage.mkdir()


def mount_again(storage: Path) -> None:
    if storage.exists():
        storage.rmdir()
    storage.with_name("away").rename(storage)


@pytest.mark.exhaustive("[True]")
@pytest.mark.parametrize("is_mount_point", [False, True])
def test_unmounted_storage_is_not_recreated_and_trial_resumes(
    master: MasterForTest, tmp_path: Path, *, is_mount_point: bool
) -> None:
    storage = tmp_path / "nfs" / "checkpoints"
    experiment_id = submit(master, saving(tmp_path, storage), SAVING_EVENTS)
    wait_for(lambda: len(checkpoints_of(master, experiment_id)) >= 5)

    unmount(storage, tmp_path, leaves_mount_point=is_mount_point)
    wait_for(
        lambda: "waiting for its checkpoint storage: checkpoint storage" in log_of(master, experiment_id)
    )

    assert f"checkpoint storage {storage} is gone: " in log_of(master, experiment_id)
    assert f"make {storage}/{STORAGE_MARKER}." in log_of(master, experiment_id)
    assert (list(storage.iterdir()) == []) if is_mount_point else not storage.exists()
    assert experiment(master, experiment_id)["state"] == "STATE_QUEUED"
    status = json.loads(master.dstrial("status", "--json").stdout)
    assert "waiting for its checkpoint storage" in status["starting"][0]["phase"]
    # A trial with another storage is not delayed.
    other = submit(
        master, config(checkpoint_storage={"type": "shared_fs", "host_path": str(tmp_path / "other")})
    )
    wait_until(master, other, "COMPLETED")

    before = len(checkpoints_of(master, experiment_id))
    mount_again(storage)
    wait_for(lambda: len(checkpoints_of(master, experiment_id)) >= before + 3)
    (tmp_path / "last").touch()
    wait_until(master, experiment_id, "COMPLETED")

    [trial] = trials(master, experiment_id)
    assert int(trial["restarts"]) == 0
    assert lost(master, experiment_id, storage) == []
    wait_for(lambda: half_written(master, experiment_id, storage) == set())


def test_checkpoint_deletion_is_postponed_while_storage_unmounted(
    master: MasterForTest, tmp_path: Path
) -> None:
    storage = tmp_path / "storage"
    given = saving(tmp_path, storage)
    given["checkpoint_storage"]["save_trial_latest"] = 1
    experiment_id = submit(master, given, SAVING)
    wait_for(lambda: len(checkpoints_of(master, experiment_id)) >= 5)
    client = master.client()
    unmount(storage, tmp_path)
    wait_for(lambda: "waiting for its checkpoint storage" in log_of(master, experiment_id))
    client.post(f"/api/v1/experiments/{experiment_id}/cancel")
    wait_until(master, experiment_id, "CANCELED")
    wait_for(lambda: f"is postponed: checkpoint storage {storage}" in master_log(master))
    states = {one["state"] for one in checkpoints_of(master, experiment_id)}
    assert states == {"STATE_COMPLETED"}

    mount_again(storage)
    wait_for(lambda: sum("COMPLETED" in one["state"] for one in checkpoints_of(master, experiment_id)) == 1)
    # A checkpoint that was half-written at the cancellation is deleted after the stored checkpoints.
    wait_for(lambda: len([path for path in storage.glob("*-*-*-*-*") if (path / "model").exists()]) == 1)


def master_log(master: MasterForTest) -> str:
    return "".join(path.read_text() for path in master.state.path.glob("*.log"))


KILLED_WHILE_SAVING = """
import os, pathlib, signal, sys
import determined as det

info = det.get_cluster_info()
with det.core.init(tensorboard_mode=det.core.TensorboardMode.MANUAL) as core:
    with core.checkpoint.store_path({"steps_completed": 1}) as (path, _):
        (path / "half").write_bytes(b"x" * 123456)
        if info.trial._trial_run_id <= 3:
            os.kill(os.getpid(), signal.SIGKILL)
    core.train.report_validation_metrics(1, {"score": 0.5})
"""


def test_half_written_checkpoints_of_killed_runs_are_deleted(master: MasterForTest, tmp_path: Path) -> None:
    """The log states their sizes; directories of other masters are kept."""
    storage = tmp_path / "storage"
    theirs = storage / "0f4f1f9e-8f0a-4c3e-9a53-1f4b1b8a0f5e"
    theirs.mkdir(parents=True)
    (theirs / "half").write_text("of another master")
    given = config(max_restarts=5, checkpoint_storage={"type": "shared_fs", "host_path": str(storage)})
    experiment_id = submit(master, given, KILLED_WHILE_SAVING)

    wait_until(master, experiment_id, "COMPLETED")
    wait_for(lambda: log_of(master, experiment_id).count("deleted a half-written checkpoint of a run") == 3)

    assert "123,456 bytes" in log_of(master, experiment_id)
    [kept] = checkpoints_of(master, experiment_id)
    assert {path.parent.name for path in storage.glob("*/half")} == {kept["uuid"], theirs.name}


def test_database_restore_keeps_checkpoints_reported_since(master: MasterForTest, tmp_path: Path) -> None:
    storage = tmp_path / "storage"
    experiment_id = submit(master, saving(tmp_path, storage), SAVING)
    wait_for(lambda: len(checkpoints_of(master, experiment_id)) >= 2)
    assert master.dstrial("backup", str(tmp_path / "copy.db")).returncode == 0
    copied = len(checkpoints_of(master, experiment_id))
    wait_for(lambda: len(checkpoints_of(master, experiment_id)) >= copied + 5)
    reported = {one["uuid"] for one in checkpoints_of(master, experiment_id)}
    master.kill()
    # A child process of the killed master may still hold the lock for a moment.
    wait_for(lambda: master.dstrial("restore", str(tmp_path / "copy.db")).returncode == 0)

    master.up()
    (tmp_path / "last").touch()
    wait_until(master, experiment_id, "COMPLETED")
    wait_for(lambda: num_pending_jobs(master.state) == 0)

    assert {one["uuid"] for one in checkpoints_of(master, experiment_id)} < reported | listed_in(storage)
    assert reported <= listed_in(storage)


def listed_in(storage: Path) -> set[str]:
    return {path.parent.name for path in storage.glob("*/state.json")}


def test_master_started_without_storage_waits(master: MasterForTest, tmp_path: Path) -> None:
    storage = tmp_path / "storage"
    experiment_id = submit(master, saving(tmp_path, storage), SAVING)
    wait_for(lambda: len(checkpoints_of(master, experiment_id)) >= 2)
    assert master.dstrial("down", "--now").returncode == 0
    storage.rename(storage.with_name("away"))

    master.up()
    wait_for(lambda: "waiting for its checkpoint storage" in log_of(master, experiment_id))
    assert not storage.exists()

    mount_again(storage)
    (tmp_path / "last").touch()
    wait_until(master, experiment_id, "COMPLETED")
    assert lost(master, experiment_id, storage) == []
