"""Creation and checks of an experiment's checkpoint storage directory."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from stored import store_experiment
from waiting import wait_for

from dstrial.master.lifecycle.storages import Storages
from dstrial.master.store.database import Database
from dstrial.storage_guard import STORAGE_MARKER, StorageGoneError


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


def test_first_use_creates_storage_and_marker(
    database: Database, storage: dict[str, Any], root: Path
) -> None:
    storages = Storages(database, umask=0o027)
    assert storages.trouble(storage) is None
    assert not root.exists()

    known = storages.secure(storage)

    assert known == root
    assert (root / STORAGE_MARKER).stat().st_mode & 0o777 == 0o640
    assert root.stat().st_mode & 0o777 == 0o750
    assert Storages(database).secure(storage) == known


def test_used_storage_is_never_recreated(database: Database, storage: dict[str, Any], root: Path) -> None:
    storages = Storages(database)
    storages.secure(storage)
    root.parent.rename(root.parent.with_name("away"))

    assert "is gone: no directory" in str(storages.trouble(storage))
    with pytest.raises(StorageGoneError):
        storages.secure(storage)
    root.mkdir(parents=True)
    with pytest.raises(StorageGoneError, match="nothing is mounted"):
        storages.secure(storage)
    assert list(root.iterdir()) == []


def test_remote_or_relative_storage_is_not_checked(database: Database) -> None:
    for storage in ({"type": "s3", "bucket": "b"}, {"type": "directory", "container_path": "relative"}):
        assert Storages(database).trouble(storage) is None
        assert Storages(database).secure(storage) is None


def hang(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Make ``os.stat`` of marker files block until the event, as on a hung NFS mount."""
    release = threading.Event()
    stat = os.stat

    def hangs(path: Any, *args: Any, **options: Any) -> os.stat_result:
        if str(path).endswith(STORAGE_MARKER):
            release.wait(60)
        return stat(path, *args, **options)

    monkeypatch.setattr(os, "stat", hangs)
    return release


def test_hung_storage_is_unavailable_until_it_answers(
    database: Database, storage: dict[str, Any], root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root.mkdir(parents=True)
    Storages(database).secure(storage)
    release = hang(monkeypatch)
    storages = Storages(database, timeout_s=0.2)
    try:
        assert "is gone: no answer within 0.2 s" in str(storages.trouble(storage))
    finally:
        release.set()
        wait_for(lambda: all(thread.name != "dstrial-storage" for thread in threading.enumerate()))
    root.rename(tmp_path / "away")
    assert "is gone: no directory" in str(storages.trouble(storage))
