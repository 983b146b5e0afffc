"""The local checkpoint store of a run directory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from determined import core, errors
from determined.common import storage
from rank_processes import names_in

from dstrial.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointNotFoundError,
    DstrialError,
    RankError,
)
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


@pytest.mark.parametrize("shard", [False, True])
@pytest.mark.parametrize("make_store", [local_store, determined_store])
def test_store_behaves_like_determined_store(
    make_store: Callable[[Path], core.CheckpointContext], tmp_path: Path, shard: bool
) -> None:
    store = make_store(tmp_path / "store")
    first, second = save(store, 10, shard=shard), save(store, 10, shard=shard)
    assert first != second
    with store.restore_path(first) as path:
        assert (Path(path) / "state").read_text() == "10"
        assert '"steps_completed": 10' in (Path(path) / "metadata.json").read_text()

    source = tmp_path / "source"
    (source / "deep").mkdir(parents=True)
    for name in ("deep/a file", "b", "c"):
        (source / name).write_text(name)
    uploaded = store.upload(source, {"steps_completed": 1}, shard=shard)
    store.download(uploaded, tmp_path / "whole")
    assert {name: (tmp_path / "whole" / name).read_text() for name in ("deep/a file", "b")} == {
        "deep/a file": "deep/a file",
        "b": "b",
    }
    chosen = store.upload(
        source, {"steps_completed": 1}, shard=shard, selector=lambda name: name in ("b", "c")
    )
    store.download(chosen, tmp_path / "part", selector=lambda name: name == "b")
    assert names_in(tmp_path / "part") == ["b"]
    with store.restore_path(chosen) as path:
        assert not (Path(path) / "deep").exists()
    with pytest.raises((CheckpointError, RuntimeError)):
        store.upload(None, {"steps_completed": 1}, shard=shard)

    store.delete(first)
    with pytest.raises((DstrialError, errors.CheckpointNotFound)), store.restore_path(first):
        pass


def test_checkpoint_does_not_exist_before_store_path_exits(tmp_path: Path) -> None:
    store = local_store(tmp_path)
    with store.store_path({"steps_completed": 1}) as (path, storage_id):
        assert path.is_dir()
        assert store.list() == []
        with pytest.raises(CheckpointNotFoundError), store.restore_path(storage_id):
            pass
    assert [entry.uuid for entry in store.list()] == [storage_id]
    assert names_in(tmp_path) == [storage_id]


def test_unknown_checkpoint_error_lists_existing_checkpoints(tmp_path: Path) -> None:
    store = local_store(tmp_path)
    storage_id = save(store, 1)
    with pytest.raises(
        CheckpointNotFoundError, match=f"checkpoint is 'nonsense'; .*Choose one of: {storage_id}"
    ):
        store.get_metadata("nonsense")


def test_checkpoint_of_another_run_restores_by_path(tmp_path: Path) -> None:
    storage_id = save(local_store(tmp_path / "a"), 7)
    with local_store(tmp_path / "b").restore_path(str(tmp_path / "a" / storage_id)) as path:
        assert (path / "state").read_text() == "7"


def test_downloaded_cluster_checkpoint_restores_by_path(tmp_path: Path) -> None:
    downloaded = tmp_path / "downloaded"
    downloaded.mkdir()
    store = local_store(tmp_path / "store")
    with pytest.raises(CheckpointNotFoundError), store.restore_path(str(downloaded)):
        pass
    (downloaded / "manifest.json").write_text("{}")
    with store.restore_path(str(downloaded)) as path:
        assert path == downloaded


def test_invalid_completion_marker_is_damaged_checkpoint_error(tmp_path: Path) -> None:
    store = local_store(tmp_path)
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "COMPLETE").write_text('{"a": 1}')
    with pytest.raises(CheckpointDamagedError, match="expected one with steps_completed and time"):
        store.list()


class OneOfTwoRanks(core.DummyDistributedContext):  # type: ignore[misc]  # mypy does not follow determined
    """Context of one of two ranks; its peer returns ``peer_answer`` in every gather."""

    def __init__(self, rank: int, peer_answer: Any) -> None:
        super().__init__()
        self.rank, self.size = rank, 2
        self._peer_answer = peer_answer

    def broadcast(self, stuff: Any) -> Any:
        return stuff

    def allgather(self, stuff: Any) -> list[Any]:
        return [stuff, self._peer_answer] if self.rank == 0 else [self._peer_answer, stuff]


def test_checkpoint_is_removed_if_peer_cannot_begin(tmp_path: Path) -> None:
    store = open_checkpoint_store(OneOfTwoRanks(0, ("rank 1: no storage", None)), tmp_path)
    with (
        pytest.raises(CheckpointError, match="rank 1: no storage"),
        store.store_path({"steps_completed": 1}, shard=True),
    ):
        pass
    assert names_in(tmp_path) == []


def test_only_chief_creates_and_removes_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "of the chief.saving").mkdir()
    store = open_checkpoint_store(OneOfTwoRanks(1, None), tmp_path)
    store._storage_manager.pre_store_path("of the chief")
    assert names_in(tmp_path) == ["of the chief.saving"]


def test_unsharded_save_on_worker_is_rejected(tmp_path: Path) -> None:
    store = open_checkpoint_store(OneOfTwoRanks(1, None), tmp_path)
    with (
        pytest.raises(RankError, match=r"store_path\(shard=False\) is called on rank 1; .* Pass shard=True"),
        store.store_path({"steps_completed": 1}),
    ):
        pass


@pytest.mark.parametrize(("source", "message"), [(None, "ckpt_dir is None"), ("absent", "No such file")])
def test_upload_of_missing_directory_is_rejected(tmp_path: Path, source: str | None, message: str) -> None:
    store = local_store(tmp_path / "store")
    with pytest.raises(CheckpointError, match=message):
        store.upload(source and tmp_path / source, {"steps_completed": 1})
    assert names_in(tmp_path / "store") == []


def raise_own(_path: Path) -> None:
    raise KeyError("mine")


def fill_disk(_path: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        full.write(b"x")


@pytest.mark.parametrize(
    ("metadata", "fail", "kind", "message"),
    [
        ({"a": 1}, Path.touch, ValueError, "expected the key 'steps_completed'"),
        ({"steps_completed": 2}, raise_own, KeyError, "mine"),
        (
            {"steps_completed": 2},
            fill_disk,
            CheckpointError,
            r"rank 0: OSError: .*No space left on device.*\d+ bytes free in",
        ),
    ],
)
def test_failed_save_reports_cause_and_leaves_nothing(
    tmp_path: Path,
    metadata: dict[str, Any],
    fail: Callable[[Path], None],
    kind: type[Exception],
    message: str,
) -> None:
    store = local_store(tmp_path)
    kept = save(store, 1)
    with pytest.raises(kind, match=message), store.store_path(metadata) as (path, _):
        (path / "half").write_text("x")
        fail(path / "half")
    assert names_in(tmp_path) == [kept]
    with store.restore_path(kept) as path:
        assert (path / "state").read_text() == "1"


def test_recreated_storage_directory_is_not_accepted(tmp_path: Path) -> None:
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
from determined import core, errors
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
def test_incomplete_checkpoint_of_killed_process_is_removed(tmp_path: Path) -> None:
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
def test_incomplete_checkpoint_of_running_process_is_kept(tmp_path: Path) -> None:
    saving = subprocess.Popen(
        [sys.executable, "-c", KILLED_WHILE_SAVING, str(tmp_path), "live"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert saving.stdout is not None
        assert saving.stdout.readline() == "saving\n"
        remove_incomplete_checkpoints(tmp_path)
        assert len(names_in(tmp_path)) == 2
        saving.communicate("\n")
    finally:
        saving.kill()
        saving.wait()
    assert [entry.steps_completed for entry in local_store(tmp_path).list()] == [2]


def test_reused_pid_does_not_protect_incomplete_checkpoint(tmp_path: Path) -> None:
    name = "123e4567-e89b-42d3-a456-426614174000"
    (tmp_path / name).mkdir()
    (tmp_path / name / "half").write_bytes(b"x" * 700)
    host = os.uname().nodename
    (tmp_path / f"{name}.saving").mkdir()
    (tmp_path / f"{name}.saving" / "writer.json").write_text(
        f'{{"host": "{host}", "pid": {os.getpid()}, "started": "1"}}'
    )
    remove_incomplete_checkpoints(tmp_path)
    assert names_in(tmp_path) == []


@pytest.mark.parametrize(("keep", "expected"), [(KeepPolicy(1, 1), [1, 3]), (None, [1, 2, 3])])
def test_keep_policy_is_applied_after_each_checkpoint(
    tmp_path: Path, keep: KeepPolicy | None, expected: list[int]
) -> None:
    validations = {1: 0.1, 2: 0.5, 3: 0.4}
    store = local_store(tmp_path, keep=keep, validations=lambda: validations, smaller_is_better=True)
    for steps_completed in (1, 2, 3):
        save(store, steps_completed)
    assert [entry.steps_completed for entry in store.list()] == expected
    assert len(names_in(tmp_path)) == len(expected)


@pytest.mark.parametrize("form", ["{other}", "../{run}", "../b/{run}"])
def test_delete_checkpoint_by_path_is_rejected(tmp_path: Path, form: str) -> None:
    """A store accepts only UUIDs of its own checkpoints for deletion."""
    other = tmp_path / "a" / save(local_store(tmp_path / "a"), 7)
    store = local_store(tmp_path / "b")
    own = save(store, 1)

    with pytest.raises(CheckpointNotFoundError, match="expected a UUID from list"):
        store.delete(form.format(other=other, run=own))

    assert other.is_dir()
    assert [checkpoint.uuid for checkpoint in store.list()] == [own]
