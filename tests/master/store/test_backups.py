"""Backup and restore of the master's database."""

from __future__ import annotations

import contextlib
import sqlite3
import stat
import time
from pathlib import Path

import pytest

from dstrial.errors import DatabaseDamagedError, MasterError
from dstrial.master.store import sqlite_file
from dstrial.master.store.database import Database, Transaction, make_cluster_id


def add_job(tx: Transaction) -> int:
    cursor = tx.execute(
        "INSERT INTO work (kind, experiment_id, payload, created_us) VALUES ('gc', 1, '{}', 1)"
    )
    return int(cursor.lastrowid or 0)


def dump(path: Path) -> str:
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        return "\n".join(connection.iterdump())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Path of a closed database that contains three jobs."""
    with contextlib.closing(Database(tmp_path / "master.db")) as database:
        database.write(make_cluster_id)
        for _ in range(3):
            database.write(add_job)
    return tmp_path / "master.db"


def test_backup_is_single_private_file(path: Path, tmp_path: Path) -> None:
    target = tmp_path / "elsewhere" / "copy.db"
    with contextlib.closing(Database(path)):
        sqlite_file.make_copy(path, target)

    assert [entry.name for entry in target.parent.iterdir()] == ["copy.db"]
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    assert dump(target) == dump(path)


def test_backup_overwrites_no_existing_file(path: Path, tmp_path: Path) -> None:
    target = tmp_path / "mine.db"
    target.write_text("mine")

    with pytest.raises(MasterError, match="exists; expected a new file"):
        sqlite_file.make_copy(path, target)

    assert target.read_text() == "mine"


def test_backup_of_missing_database_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MasterError, match="is missing or empty; expected a database"):
        sqlite_file.make_copy(tmp_path / "master.db", tmp_path / "copy.db")
    assert list(tmp_path.iterdir()) == []


def test_backup_of_damaged_database_is_refused(path: Path, tmp_path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[4096 * 3 : 4096 * 4] = bytes(4096)
    path.write_bytes(data)

    with pytest.raises(DatabaseDamagedError, match="cannot be copied"):
        sqlite_file.make_copy(path, tmp_path / "copy.db")
    assert not list(tmp_path.glob("*copy.db*"))


def test_daily_backups_keep_seven_plus_manual_copies(path: Path) -> None:
    asked = sqlite_file.new_path(path, 0.0, "master")
    sqlite_file.make_copy(path, asked)
    start_s = time.time()

    made = [sqlite_file.make_daily_copy(path, start_s + day * sqlite_file.DAY_S) for day in range(9)]
    assert sqlite_file.make_daily_copy(path, start_s + 8 * sqlite_file.DAY_S + 3600) is None

    left = [copy.path for copy in sqlite_file.list_copies(path)]
    assert left == [*reversed(made[2:]), asked]
    assert len(list(sqlite_file.directory_of(path).iterdir())) == 8


def test_restore_keeps_killed_masters_database_and_wal(path: Path, tmp_path: Path) -> None:
    target = tmp_path / "copy.db"
    sqlite_file.make_copy(path, target)
    killed = tmp_path / "killed"
    killed.mkdir()
    with contextlib.closing(Database(path)) as database:
        database.write(add_job)
        for end in ("", "-wal"):
            (killed / f"master.db{end}").write_bytes(path.with_name(f"master.db{end}").read_bytes())
    wanted = dump(path)

    restored = sqlite_file.restore_copy(killed / "master.db", target)

    assert restored.kept is not None
    assert dump(restored.kept / "master.db") == wanted
    Database(killed / "master.db").close()


def test_restore_of_damaged_copy_changes_nothing(path: Path, tmp_path: Path) -> None:
    target = tmp_path / "copy.db"
    sqlite_file.make_copy(path, target)
    data = bytearray(target.read_bytes())
    data[4096 * 3 : 4096 * 4] = b"\xff" * 4096
    target.write_bytes(data)
    before = path.read_bytes()

    with pytest.raises(DatabaseDamagedError, match=r"copy\.db cannot be used .*expected a whole database"):
        sqlite_file.restore_copy(path, target)

    assert path.read_bytes() == before
    assert not list(tmp_path.glob("replaced-*"))
    assert not list(tmp_path.glob("*.new"))


@pytest.mark.parametrize("num_moved", [1, 2])
def test_interrupted_restore_blocks_start_until_repeated(
    path: Path, tmp_path: Path, num_moved: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "copy.db"
    sqlite_file.make_copy(path, target)
    with contextlib.closing(Database(path)) as database:
        database.write(add_job)
        (tmp_path / "log").write_bytes(path.with_name("master.db-wal").read_bytes())
    (tmp_path / "log").rename(path.with_name("master.db-wal"))
    rename, moved = Path.rename, []

    def rename_and_end(source: Path, to: Path) -> Path:
        if len(moved) == num_moved:
            raise KeyboardInterrupt
        moved.append(source)
        return rename(source, to)

    monkeypatch.setattr(Path, "rename", rename_and_end)
    monkeypatch.setattr(Path, "replace", rename_and_end)
    with pytest.raises(KeyboardInterrupt):
        sqlite_file.restore_copy(path, target)
    monkeypatch.undo()

    with pytest.raises(DatabaseDamagedError, match=r"is missing; expected the database .*dstrial restore"):
        Database(path)
    sqlite_file.restore_copy(path, target)
    assert dump(path) == dump(target)


def test_restore_into_empty_directory_succeeds(path: Path, tmp_path: Path) -> None:
    target = tmp_path / "copy.db"
    sqlite_file.make_copy(path, target)
    (tmp_path / "new").mkdir()

    restored = sqlite_file.restore_copy(tmp_path / "new" / "master.db", target)

    assert restored.kept is None
    assert dump(tmp_path / "new" / "master.db") == dump(path)
