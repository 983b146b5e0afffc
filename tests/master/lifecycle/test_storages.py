"""Which directory is taken for an experiment's storage, and which never."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from stored import store_checkpoints, store_experiment
from waiting import wait_for

from dstrial.checkpoint.storage_identity import StorageIdentity
from dstrial.master.lifecycle.storages import Storages, judge
from dstrial.master.store import storages as storage_rows
from dstrial.master.store.database import Database
from dstrial.storage_guard import A_COPY, IDENTITY_NAME, StorageGoneError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "nfs" / "storage"


@pytest.fixture
def storage(root: Path) -> dict[str, Any]:
    return {"type": "shared_fs", "host_path": str(root.parent), "storage_path": root.name}


@pytest.fixture
def database(tmp_path: Path, storage: dict[str, Any]) -> Iterator[Database]:
    with contextlib.closing(Database(tmp_path / "master.db")) as opened:
        store_experiment(opened, tmp_path, storage)
        yield opened


def test_a_first_use_makes_the_storage_and_its_identity(
    database: Database, storage: dict[str, Any], root: Path
) -> None:
    storages = Storages(database, umask=0o027)
    assert storages.trouble(storage) is None
    assert not root.exists()

    known = storages.secure(storage)

    assert known is not None
    assert known.path == str(root)
    assert (root / IDENTITY_NAME).stat().st_mode & 0o777 == 0o640
    assert root.stat().st_mode & 0o777 == 0o750
    assert Storages(database).secure(storage) == known


def test_a_storage_that_has_had_an_identity_is_never_made_again(
    database: Database, storage: dict[str, Any], root: Path
) -> None:
    storages = Storages(database)
    storages.secure(storage)
    root.parent.rename(root.parent.with_name("away"))

    assert "is gone: no directory" in str(storages.trouble(storage, is_fresh=True))
    with pytest.raises(StorageGoneError):
        storages.secure(storage)
    root.mkdir(parents=True)
    with pytest.raises(StorageGoneError, match="nothing is mounted"):
        storages.secure(storage)
    assert list(root.iterdir()) == []


def test_an_older_storage_is_adopted_only_where_it_is_seen_to_be_it(
    database: Database, storage: dict[str, Any], root: Path, tmp_path: Path
) -> None:
    store_checkpoints(database, root, "a", "b")
    root.rename(tmp_path / "away")

    for make in (lambda: None, root.mkdir):
        make()
        storages = Storages(database)
        assert "no file of the checkpoints that it has" in str(storages.trouble(storage))
        with pytest.raises(StorageGoneError):
            storages.secure(storage)
    assert list(root.iterdir()) == []
    root.rmdir()
    (tmp_path / "away").rename(root)
    assert Storages(database).secure(storage) is not None


def test_a_storage_that_was_restored_on_another_disk_is_taken_with_its_checkpoints_only(
    database: Database, storage: dict[str, Any], root: Path, tmp_path: Path
) -> None:
    store_checkpoints(database, root, "a", "b")
    first = Storages(database).secure(storage)
    assert first is not None
    # A copy has other inodes; that it lies on another device is told to the database here.
    copy = tmp_path / "copy"
    shutil.copytree(root, copy)
    root.rename(tmp_path / "away")
    copy.rename(root)
    database.write(lambda tx: storage_rows.remember(tx, dataclasses.replace(first, device=1)))
    (root / "a").rename(tmp_path / "a")
    assert f"is gone: {A_COPY}" in str(Storages(database).trouble(storage))

    (tmp_path / "a").rename(root / "a")
    assert Storages(database).trouble(storage) is None
    again = Storages(database).secure(storage)
    assert again is not None
    assert again.id == first.id
    assert again.device == first.device
    assert again.inode != first.inode


@pytest.mark.parametrize(
    ("instead", "expected", "found", "verdict"),
    [
        ("no directory", 3, 3, "no directory"),
        (A_COPY, 3, 2, A_COPY),
        (A_COPY, 3, 3, None),
        (A_COPY, 0, 0, None),
        (None, 3, 0, None),
    ],
)
def test_a_known_storage_is_judged_by_what_is_there(
    instead: str | None, expected: int, found: int, verdict: str | None
) -> None:
    known = StorageIdentity("/storage", "id", 1, 2)
    assert judge(known, instead, has_files=True, expected=expected, found=found) == verdict


def test_a_storage_that_is_no_directory_of_this_machine_is_not_looked_at(database: Database) -> None:
    for storage in ({"type": "s3", "bucket": "b"}, {"type": "directory", "container_path": "relative"}):
        assert Storages(database).trouble(storage) is None
        assert Storages(database).secure(storage) is None


def hang(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Have looks at identity files wait for the event, as those at a network file system whose server is away."""
    release = threading.Event()
    stat = os.stat

    def hangs(path: Any, *args: Any, **options: Any) -> os.stat_result:
        if str(path).endswith(IDENTITY_NAME):
            release.wait(60)
        return stat(path, *args, **options)

    monkeypatch.setattr(os, "stat", hangs)
    return release


def test_a_storage_that_does_not_answer_is_waited_for_once(
    database: Database, storage: dict[str, Any], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root.mkdir(parents=True)
    Storages(database).secure(storage)
    release = hang(monkeypatch)
    storages = Storages(database, timeout_s=0.2)
    try:
        for _ in range(3):
            assert "does not answer within 0.2 s" in str(storages.trouble(storage, is_fresh=True))
        assert sum(thread.name == "dstrial-storage" for thread in threading.enumerate()) == 1
    finally:
        release.set()
        wait_for(lambda: all(thread.name != "dstrial-storage" for thread in threading.enumerate()))


def test_what_a_storage_answers_too_late_is_not_taken_for_how_it_is_later(
    database: Database, storage: dict[str, Any], root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root.mkdir(parents=True)
    Storages(database).secure(storage)
    release = hang(monkeypatch)
    storages = Storages(database, timeout_s=0.2)
    assert "does not answer" in str(storages.trouble(storage, is_fresh=True))
    release.set()
    wait_for(lambda: all(thread.name != "dstrial-storage" for thread in threading.enumerate()))
    root.rename(tmp_path / "away")

    assert "is gone: no directory" in str(storages.trouble(storage, is_fresh=True))
