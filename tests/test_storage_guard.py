"""The storage guard: missing storages, and records of unreported checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from dstrial.storage_guard import (
    STORAGE_MARKER,
    STORAGE_VARIABLE,
    StorageGoneError,
    StorageGuard,
    guard_of_environment,
    is_storage_gone,
    what_is_there_instead,
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = tmp_path / "nfs" / "storage"
    made.mkdir(parents=True)
    (made / STORAGE_MARKER).touch()
    return made


@pytest.fixture
def guard(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StorageGuard:
    monkeypatch.setenv(STORAGE_VARIABLE, str(root))
    made = guard_of_environment(str(tmp_path / "allocation"))
    assert made is not None
    return made


def test_missing_storage_is_described(root: Path, tmp_path: Path) -> None:
    away = tmp_path / "away"

    assert what_is_there_instead(str(root)) is None
    root.rename(away)
    assert what_is_there_instead(str(root)) == "no directory"
    root.write_text("")
    assert what_is_there_instead(str(root)) == "no directory"
    root.unlink()
    root.mkdir()
    assert "nothing is mounted" in str(what_is_there_instead(str(root)))
    root.rmdir()
    away.rename(root)
    assert what_is_there_instead(str(root)) is None


def test_save_is_refused_without_storage(guard: StorageGuard, root: Path, tmp_path: Path) -> None:
    guard.check()
    assert guard.covers(f"{root}/")
    assert not guard.covers(str(root.parent))
    root.rename(tmp_path / "away")

    with pytest.raises(StorageGoneError, match="is gone: no directory; expected the storage") as raised:
        guard.check()

    assert is_storage_gone(raised.value)
    assert not root.exists()


def test_guard_notes_unreported_checkpoints_by_valid_name(guard: StorageGuard, tmp_path: Path) -> None:
    """Names that lead outside the directory of notes are ignored."""
    for name in ("0f4f1f9e", "../x", "", ".."):
        guard.note(name)

    assert [path.name for path in (tmp_path / "allocation" / "saving").iterdir()] == ["0f4f1f9e"]
    (tmp_path / "allocation" / "x").touch()
    for name in ("../x", "", "..", "never begun", "0f4f1f9e"):
        guard.forget(name)
    assert sorted(path.name for path in (tmp_path / "allocation").rglob("*")) == ["saving", "x"]


def test_guard_is_none_without_storage_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(STORAGE_VARIABLE, raising=False)

    assert guard_of_environment("/nowhere") is None
