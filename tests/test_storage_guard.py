"""What a process of an allocation may make while its storage is there, and when it is gone."""

# Every way to make a directory is tried.
# ruff: noqa: PTH102, PTH103

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from dstrial.checkpoint.storage_identity import StorageIdentity, accept_identity, claim_identity
from dstrial.storage_guard import (
    A_COPY,
    IDENTITY_NAME,
    STORAGE_VARIABLE,
    StorageGoneError,
    StorageGuard,
    guard_of_environment,
    is_storage_gone,
    what_is_there_instead,
)


@pytest.fixture
def storage(tmp_path: Path) -> StorageIdentity:
    root = tmp_path / "nfs" / "storage"
    root.mkdir(parents=True)
    return claim_identity(root, "cluster")


@pytest.fixture
def guard(storage: StorageIdentity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StorageGuard:
    made = StorageGuard(storage.fields(), str(tmp_path / "allocation"))
    monkeypatch.setattr(os, "mkdir", os.mkdir)
    made.install()
    return made


def test_what_is_in_place_of_a_storage_is_named(storage: StorageIdentity, tmp_path: Path) -> None:
    root, away = Path(storage.path), tmp_path / "away"

    assert what_is_there_instead(storage.path, storage.fields()) is None
    root.rename(away)
    assert what_is_there_instead(storage.path, storage.fields()) == "no directory"
    root.write_text("")
    assert what_is_there_instead(storage.path, storage.fields()) == "no directory"
    root.unlink()
    root.mkdir()
    assert "nothing is mounted" in str(what_is_there_instead(storage.path, storage.fields()))
    claim_identity(root, "cluster")
    assert "another storage, of id " in str(what_is_there_instead(storage.path, storage.fields()))
    (root / IDENTITY_NAME).write_text("{")
    assert "another storage, of id None" in str(what_is_there_instead(storage.path, storage.fields()))
    (root / IDENTITY_NAME).unlink()
    root.rmdir()
    away.rename(root)
    assert what_is_there_instead(storage.path, storage.fields()) is None


@pytest.mark.parametrize(("device", "inode", "instead"), [(1, 0, None), (0, 10**9, None), (1, 10**9, A_COPY)])
def test_a_mount_changes_the_device_and_a_copy_the_inode_too(
    storage: StorageIdentity, device: int, inode: int, instead: str | None
) -> None:
    known = {**storage.fields(), "device": storage.device + device, "inode": storage.inode + inode}

    assert what_is_there_instead(storage.path, known) == instead


def test_a_directory_that_a_person_has_accepted_is_the_storage_and_a_copy_of_its_file_makes_no_other(
    storage: StorageIdentity, tmp_path: Path
) -> None:
    known = StorageIdentity(storage.path, storage.id, storage.device + 1, storage.inode + 10**9)
    accept_identity(known)
    assert what_is_there_instead(known.path, known.fields()) is None

    root = Path(storage.path)
    content = (root / IDENTITY_NAME).read_bytes()
    root.rename(tmp_path / "away")
    root.mkdir()
    (root / IDENTITY_NAME).write_bytes(content)
    assert what_is_there_instead(known.path, known.fields()) == A_COPY


def test_a_storage_where_nobody_may_write_is_known_by_its_root(tmp_path: Path) -> None:
    root = tmp_path / "read-only"
    root.mkdir()
    status = root.stat()
    known = StorageIdentity(str(root), None, status.st_dev, status.st_ino)

    assert what_is_there_instead(str(root), known.fields()) is None
    root.rename(tmp_path / "away")
    root.mkdir()
    assert what_is_there_instead(str(root), known.fields()) == A_COPY
    root.rmdir()
    assert what_is_there_instead(str(root), known.fields()) == "no directory"


def test_nothing_of_a_storage_that_is_gone_is_made_whoever_makes_it(
    guard: StorageGuard, storage: StorageIdentity, tmp_path: Path
) -> None:
    root = Path(storage.path)
    (root / "before").mkdir()
    root.parent.rename(tmp_path / "away")

    for make in (
        lambda: os.makedirs(root / "uuid" / "model0", exist_ok=True),
        lambda: (root / "uuid").mkdir(parents=True, exist_ok=True),
        lambda: root.mkdir(parents=True),
        lambda: os.mkdir(os.fsencode(root.parent)),
        guard.check,
    ):
        with pytest.raises(StorageGoneError, match="is gone: no directory; expected the storage") as raised:
            make()
        assert is_storage_gone(raised.value)
    assert not root.parent.exists()

    (tmp_path / "elsewhere").mkdir()
    os.makedirs(tmp_path, exist_ok=True)
    with pytest.raises(FileExistsError):
        os.mkdir(tmp_path)
    (tmp_path / "away").rename(root.parent)
    os.makedirs(root / "uuid" / "model0")


def test_nothing_is_made_in_an_empty_mount_point(
    guard: StorageGuard, storage: StorageIdentity, tmp_path: Path
) -> None:
    root = Path(storage.path)
    (tmp_path / "empty").mkdir()
    root.rename(tmp_path / "away")
    (tmp_path / "empty").rename(root)

    with pytest.raises(StorageGoneError, match="nothing is mounted"):
        os.makedirs(root / "uuid" / "model0")
    os.makedirs(root, exist_ok=True)
    assert list(root.iterdir()) == []
    assert guard.covers(f"{root}/")


def test_what_is_begun_is_noted_until_it_is_reported_and_a_name_that_leads_elsewhere_is_not(
    guard: StorageGuard, tmp_path: Path
) -> None:
    for name in ("0f4f1f9e", "../x", "", ".."):
        guard.note(name)

    assert [path.name for path in (tmp_path / "allocation" / "saving").iterdir()] == ["0f4f1f9e"]
    (tmp_path / "allocation" / "x").touch()
    for name in ("../x", "", "..", "never begun", "0f4f1f9e"):
        guard.forget(name)
    assert sorted(path.name for path in (tmp_path / "allocation").rglob("*")) == ["saving", "x"]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}"])
def test_a_process_without_a_known_storage_has_no_guard(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STORAGE_VARIABLE, text)

    assert guard_of_environment("/nowhere") is None


def test_whoever_comes_second_takes_the_id_that_is_there(storage: StorageIdentity) -> None:
    again = claim_identity(Path(storage.path), "another cluster")

    assert again == storage
    assert json.loads((Path(storage.path) / IDENTITY_NAME).read_text())["cluster_id"] == "cluster"
    assert [path.name for path in Path(storage.path).iterdir()] == [IDENTITY_NAME]


def test_a_damaged_identity_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / IDENTITY_NAME).write_text("{")

    with pytest.raises(OSError, match="identity file is damaged"):
        claim_identity(tmp_path, "cluster")
    assert (tmp_path / IDENTITY_NAME).read_text() == "{"
