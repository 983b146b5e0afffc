from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from determined import core
from determined.common import storage
from rank_processes import names_in

from dstrial.errors import CheckpointDamagedError, CheckpointError, CheckpointNotFoundError, DstrialError
from dstrial.local.checkpoint_directory import KeepPolicy, newest_checkpoint, remove_incomplete_checkpoints
from dstrial.local.checkpoint_store import LocalCheckpointContext, open_checkpoint_store


def local_store(path: Path, **options: Any) -> LocalCheckpointContext:
    return open_checkpoint_store(core.DummyDistributedContext(), path, **options)


def determined_store(path: Path) -> core.CheckpointContext:
    return core.DummyCheckpointContext(
        core.DummyDistributedContext(), storage.SharedFSStorageManager(str(path))
    )


def save(store: core.CheckpointContext, steps_completed: int, *, shard: bool = False) -> str:
    with store.store_path({"steps_completed": steps_completed}, shard=shard) as (path, storage_id):
        (path / "state").write_text(str(steps_completed))
    return storage_id


@pytest.mark.parametrize("make_store", [local_store, determined_store])
class TestCheckpointContextContract:
    """What Determined's own context off the cluster and ours must both do on one rank."""

    @pytest.mark.parametrize("shard", [False, True])
    def test_what_is_stored_is_restored(
        self, make_store: Callable[[Path], core.CheckpointContext], tmp_path: Path, shard: bool
    ) -> None:
        store = make_store(tmp_path)
        storage_id = save(store, 10, shard=shard)
        with store.restore_path(storage_id) as path:
            assert (Path(path) / "state").read_text() == "10"

    def test_metadata_lies_in_the_checkpoint(
        self, make_store: Callable[[Path], core.CheckpointContext], tmp_path: Path
    ) -> None:
        store = make_store(tmp_path)
        with store.restore_path(save(store, 10)) as path:
            assert '"steps_completed": 10' in (Path(path) / "metadata.json").read_text()

    @pytest.mark.parametrize("shard", [False, True])
    def test_a_directory_is_uploaded_and_downloaded_with_what_is_in_it(
        self, make_store: Callable[[Path], core.CheckpointContext], tmp_path: Path, shard: bool
    ) -> None:
        store = make_store(tmp_path / "store")
        source = tmp_path / "source"
        (source / "deep").mkdir(parents=True)
        (source / "deep" / "a file").write_text("a")
        (source / "b").write_text("b")
        storage_id = store.upload(source, {"steps_completed": 1}, shard=shard)
        store.download(storage_id, tmp_path / "target")
        assert (tmp_path / "target" / "deep" / "a file").read_text() == "a"
        assert (tmp_path / "target" / "b").read_text() == "b"

    def test_a_selector_chooses_what_is_uploaded_and_downloaded(
        self, make_store: Callable[[Path], core.CheckpointContext], tmp_path: Path
    ) -> None:
        store = make_store(tmp_path / "store")
        source = tmp_path / "source"
        source.mkdir()
        for name in "abc":
            (source / name).write_text(name)
        storage_id = store.upload(source, {"steps_completed": 1}, selector=lambda name: name in ("a", "b"))
        store.download(storage_id, tmp_path / "target", selector=lambda name: name == "b")
        assert names_in(tmp_path / "target") == ["b"]
        with store.restore_path(storage_id) as path:
            assert not (Path(path) / "c").exists()

    def test_each_checkpoint_has_a_name_of_its_own(
        self, make_store: Callable[[Path], core.CheckpointContext], tmp_path: Path
    ) -> None:
        store = make_store(tmp_path)
        assert save(store, 10) != save(store, 10)

    def test_a_deleted_checkpoint_cannot_be_restored(
        self, make_store: Callable[[Path], core.CheckpointContext], tmp_path: Path
    ) -> None:
        store = make_store(tmp_path)
        storage_id = save(store, 10)
        store.delete(storage_id)
        with pytest.raises((DstrialError, core_errors())), store.restore_path(storage_id):
            pass

    def test_uploading_nothing_is_an_error(
        self, make_store: Callable[[Path], core.CheckpointContext], tmp_path: Path
    ) -> None:
        with pytest.raises((CheckpointError, RuntimeError)):
            make_store(tmp_path).upload(None, {"steps_completed": 1})


def core_errors() -> type[Exception]:
    from determined import errors

    return errors.CheckpointNotFound


def test_the_uploaded_directory_is_not_changed(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "a").write_text("a")
    local_store(tmp_path / "store").upload(tmp_path / "source", {"steps_completed": 1})
    assert names_in(tmp_path / "source") == ["a"]


def test_metadata_can_be_read_and_is_written_when_the_block_ends(tmp_path: Path) -> None:
    store = local_store(tmp_path)
    metadata: dict[str, Any] = {"steps_completed": 3}
    with store.store_path(metadata) as (_, storage_id):
        metadata["note"] = "late"
    assert store.get_metadata(storage_id) == {"steps_completed": 3, "note": "late"}


def test_checkpoints_are_listed_by_batches_and_the_newest_is_the_last_completed(tmp_path: Path) -> None:
    store = local_store(tmp_path)
    late, early = save(store, 300), save(store, 100)
    assert [(entry.uuid, entry.steps_completed) for entry in store.list()] == [(early, 100), (late, 300)]
    newest = store.newest()
    assert newest is not None
    assert newest.uuid == early


def test_a_checkpoint_does_not_exist_before_the_block_has_ended(tmp_path: Path) -> None:
    store = local_store(tmp_path)
    with store.store_path({"steps_completed": 1}) as (path, storage_id):
        assert path.is_dir()
        assert store.list() == []
        with pytest.raises(CheckpointNotFoundError), store.restore_path(storage_id):
            pass
    assert [entry.uuid for entry in store.list()] == [storage_id]
    assert names_in(tmp_path) == [storage_id]


def test_a_name_that_does_not_exist_lists_those_that_do(tmp_path: Path) -> None:
    store = local_store(tmp_path)
    storage_id = save(store, 1)
    with pytest.raises(
        CheckpointNotFoundError, match=f"checkpoint is 'nonsense'; .*Choose one of: {storage_id}"
    ):
        store.get_metadata("nonsense")


def test_a_checkpoint_of_another_run_is_restored_by_its_path(tmp_path: Path) -> None:
    storage_id = save(local_store(tmp_path / "a"), 7)
    with local_store(tmp_path / "b").restore_path(str(tmp_path / "a" / storage_id)) as path:
        assert (path / "state").read_text() == "7"


def test_a_checkpoint_downloaded_from_a_cluster_is_restored_by_its_path(tmp_path: Path) -> None:
    downloaded = tmp_path / "downloaded"
    downloaded.mkdir()
    store = local_store(tmp_path / "store")
    with pytest.raises(CheckpointNotFoundError), store.restore_path(str(downloaded)):
        pass
    (downloaded / "manifest.json").write_text("{}")
    with store.restore_path(str(downloaded)) as path:
        assert path == downloaded


def test_a_completion_mark_of_something_else_is_named(tmp_path: Path) -> None:
    store = local_store(tmp_path)
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "COMPLETE").write_text('{"a": 1}')
    with pytest.raises(CheckpointDamagedError, match="expected one with steps_completed and time"):
        store.list()


def test_metadata_without_steps_completed_leaves_nothing(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match="expected the key 'steps_completed'"),
        local_store(tmp_path).store_path({"a": 1}),
    ):
        pass
    assert names_in(tmp_path) == []


def test_an_error_of_the_user_comes_through_as_it_is_and_leaves_nothing(tmp_path: Path) -> None:
    store = local_store(tmp_path)
    kept = save(store, 1)
    with pytest.raises(KeyError, match="mine"), store.store_path({"steps_completed": 2}) as (path, _):
        (path / "half").write_text("x")
        raise KeyError("mine")
    assert names_in(tmp_path) == [kept]


def test_a_full_disk_names_the_rank_the_cause_and_the_free_bytes(tmp_path: Path) -> None:
    store = local_store(tmp_path)
    kept = save(store, 1)
    with (
        pytest.raises(
            CheckpointError, match=r"rank 0: OSError: .*No space left on device.*\d+ bytes free in"
        ),
        store.store_path({"steps_completed": 2}),
        Path("/dev/full").open("wb") as full,
    ):
        full.write(b"x")
    assert names_in(tmp_path) == [kept]
    with store.restore_path(kept) as path:
        assert (path / "state").read_text() == "1"


def test_a_directory_that_is_made_anew_during_a_save_is_not_taken_for_the_one_that_went_away(
    tmp_path: Path,
) -> None:
    root, away = tmp_path / "checkpoints", tmp_path / "away"
    store = local_store(root)
    first = save(store, 1)
    with (
        pytest.raises(
            CheckpointError, match="is gone: a directory that was made since; expected the storage"
        ),
        store.store_path({"steps_completed": 2}) as (path, _),
    ):
        root.rename(away)
        path.mkdir(parents=True)
        (path / "state").write_text("2")
    with pytest.raises(CheckpointError, match="could not be begun: rank 0: StorageGoneError"):
        save(store, 3)
    assert names_in(root) == []

    root.rmdir()
    with pytest.raises(CheckpointError, match="is gone: no directory"):
        save(store, 3)
    assert not root.exists()
    away.rename(root)
    third = save(store, 3)
    assert [checkpoint.uuid for checkpoint in store.list()] == [first, third]


KILLED_WHILE_SAVING = """
import os, signal, sys
from pathlib import Path
from determined import core
from dstrial.local.checkpoint_store import open_checkpoint_store
store = open_checkpoint_store(core.DummyDistributedContext(), Path(sys.argv[1]))
with store.store_path({"steps_completed": 2}) as (path, _):
    (path / "half").write_text("x")
    print("saving", flush=True)
    if sys.argv[2] == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.stdin.readline()
"""


@pytest.mark.process
def test_what_a_killed_process_left_is_removed_at_the_next_start(tmp_path: Path) -> None:
    kept = save(local_store(tmp_path), 1)
    killed = subprocess.run(
        [sys.executable, "-c", KILLED_WHILE_SAVING, str(tmp_path), "die"], stdout=subprocess.PIPE
    )
    assert killed.returncode == -signal.SIGKILL
    assert len(names_in(tmp_path)) == 3
    newest = newest_checkpoint(tmp_path)
    assert newest is not None
    assert newest.uuid == kept
    assert [entry.uuid for entry in local_store(tmp_path).list()] == [kept]
    assert names_in(tmp_path) == [kept]


@pytest.mark.process
def test_what_a_living_process_is_saving_is_left_alone(tmp_path: Path) -> None:
    saving = subprocess.Popen(
        [sys.executable, "-c", KILLED_WHILE_SAVING, str(tmp_path), "live"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert saving.stdout is not None
        assert saving.stdout.readline() == "saving\n"
        assert remove_incomplete_checkpoints(tmp_path) == {}
        saving.communicate("\n")
    finally:
        saving.kill()
        saving.wait()
    assert [entry.steps_completed for entry in local_store(tmp_path).list()] == [2]


def test_a_pid_in_use_again_does_not_protect_what_a_dead_process_left(tmp_path: Path) -> None:
    name = "123e4567-e89b-42d3-a456-426614174000"
    (tmp_path / name).mkdir()
    (tmp_path / name / "half").write_bytes(b"x" * 700)
    host = os.uname().nodename
    (tmp_path / f"{name}.saving").mkdir()
    (tmp_path / f"{name}.saving" / "writer.json").write_text(
        f'{{"host": "{host}", "pid": {os.getpid()}, "started": "1"}}'
    )
    assert remove_incomplete_checkpoints(tmp_path) == {name: 700}
    assert names_in(tmp_path) == []


def test_a_directory_that_is_no_checkpoint_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "my notes").mkdir()
    events = tmp_path / "123e4567-e89b-42d3-a456-426614174000" / "tensorboard" / "events"
    events.parent.mkdir(parents=True)
    events.write_text("of a cluster with this id")
    assert local_store(tmp_path).list() == []
    assert local_store(tmp_path).list() == []
    assert events.read_text() == "of a cluster with this id"


def test_the_keep_policy_is_applied_after_each_checkpoint(tmp_path: Path) -> None:
    validations = {1: 0.1, 2: 0.5, 3: 0.4}
    store = local_store(
        tmp_path, keep=KeepPolicy(1, 1), validations=lambda: validations, smaller_is_better=True
    )
    for steps_completed in (1, 2, 3):
        save(store, steps_completed)
    assert [entry.steps_completed for entry in store.list()] == [1, 3]
    assert len(names_in(tmp_path)) == 2


def test_without_a_policy_everything_is_kept(tmp_path: Path) -> None:
    store = local_store(tmp_path)
    for steps_completed in range(4):
        save(store, steps_completed)
    assert [entry.steps_completed for entry in store.list()] == [0, 1, 2, 3]


@pytest.mark.parametrize("form", ["{other}", "../{run}", "../b/{run}"])
def test_delete_checkpoint_by_path_is_refused(tmp_path: Path, form: str) -> None:
    """A store deletes its own checkpoints only, by name; a path may lead anywhere."""
    other = tmp_path / "a" / save(local_store(tmp_path / "a"), 7)
    store = local_store(tmp_path / "b")
    own = save(store, 1)

    with pytest.raises(CheckpointNotFoundError, match="expected a UUID from list"):
        store.delete(form.format(other=other, run=own))

    assert other.is_dir()
    assert [checkpoint.uuid for checkpoint in store.list()] == [own]
