"""Check of the database file when it is opened, and recovery after a kill."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from dstrial.errors import DatabaseDamagedError, MasterError
from dstrial.master.store import sqlite_file
from dstrial.master.store.database import Database, Transaction, make_cluster_id


def put(tx: Transaction) -> None:
    tx.execute("INSERT INTO cluster VALUES (hex(randomblob(8)), hex(randomblob(400)))")


def put_many(tx: Transaction) -> None:
    for _ in range(200):
        put(tx)


def num_rows(path: Path) -> int:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return int(connection.execute("SELECT COUNT(*) FROM cluster").fetchone()[0])


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """Path of a killed database: 201 rows in the file, 200 in the WAL, a backup of 201."""
    path, left = tmp_path / "work" / "master.db", tmp_path / "killed" / "master.db"
    path.parent.mkdir()
    with contextlib.closing(Database(path)) as database:
        database.write(make_cluster_id)
        database.write(put_many)
    left.parent.mkdir()
    with contextlib.closing(Database(path)) as database:
        sqlite_file.make_copy(path, sqlite_file.new_path(left, 0.0, "daily"))
        database.write(put_many)
        for end in ("", "-wal"):
            shutil.copy(path.with_name(f"master.db{end}"), left.with_name(f"master.db{end}"))
    return left


def clear_pages(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(4096 * 2)
        file.write(bytes(4096 * 60))


def cut(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def delete_with_log(path: Path) -> None:
    path.unlink()
    path.with_name("master.db-wal").unlink()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (clear_pages, "is damaged"),
        (cut, "is damaged"),
        (lambda path: path.write_bytes(b""), "is empty; expected the database"),
        (Path.unlink, "is missing; expected the database"),
        (delete_with_log, "is missing; expected the database"),
    ],
    ids=["cleared pages", "cut", "emptied", "deleted", "deleted with its log"],
)
def test_damaged_or_missing_database_is_refused_unchanged(
    killed: Path, change: Callable[[Path], object], words: str
) -> None:
    log = killed.with_name("master.db-wal")
    change(killed)
    before = [path.read_bytes() if path.exists() else b"" for path in (killed, log)]

    with pytest.raises(MasterError, match=rf"master\.db {words}.*`dstrial restore .*daily.*--state-dir"):
        Database(killed)

    assert [path.read_bytes() if path.exists() else b"" for path in (killed, log)] == before


def test_emptied_database_with_wal_is_refused(killed: Path) -> None:
    shutil.rmtree(sqlite_file.directory_of(killed))
    killed.write_bytes(b"")

    with pytest.raises(DatabaseDamagedError, match=r"is empty; expected .*`dstrial restore PATH`"):
        Database(killed)


@pytest.mark.parametrize("index", [None, b"garbage" * 5000], ids=["no index", "a damaged index"])
def test_database_of_killed_master_is_recovered(killed: Path, index: bytes | None) -> None:
    if index is not None:
        killed.with_name("master.db-shm").write_bytes(index)

    Database(killed).close()

    assert num_rows(killed) == 401
    assert not killed.with_name("master.db-wal").exists()


def test_commits_are_synced_before_confirmation(tmp_path: Path) -> None:
    """In WAL mode, synchronous = FULL (2) makes SQLite sync the WAL on each commit."""
    with contextlib.closing(Database(tmp_path / "master.db")) as database:
        found = database.write(lambda tx: tx.execute("PRAGMA synchronous").fetchone()[0])
    assert found == 2


def test_writes_after_failed_large_write_survive_kill(tmp_path: Path) -> None:
    """With cache_spill on, SQLite 3.40.1 loses the later commits at recovery."""

    def fill_the_cache_and_fail(tx: Transaction) -> None:
        for _ in range(8000):
            tx.execute("INSERT INTO cluster VALUES (hex(randomblob(8)), hex(randomblob(1500)))")
        raise ValueError("no")

    path, killed = tmp_path / "master.db", tmp_path / "killed"
    with contextlib.closing(Database(path)) as database:
        with pytest.raises(ValueError, match="no"):
            database.write(fill_the_cache_and_fail)
        for _ in range(3):
            database.write(put)
        killed.mkdir()
        for end in ("", "-wal"):
            shutil.copy(path.with_name(f"master.db{end}"), killed)
    assert num_rows(killed / "master.db") == 3


def test_page_damaged_at_runtime_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "master.db"
    with contextlib.closing(Database(path)) as database:
        database.write(make_cluster_id)
        database.write(put_many)
    with contextlib.closing(Database(path)) as database:
        with sqlite_file.reading(path) as connection:
            pages = [row[0] for row in connection.execute("SELECT pageno FROM dbstat WHERE name = 'cluster'")]
        with path.open("r+b") as file:
            for page in pages:
                file.seek((page - 1) * 4096)
                file.write(b"\xff" * 64)

        with (
            pytest.raises(DatabaseDamagedError, match=r"is damaged.*dstrial restore"),
            database.read() as connection,
        ):
            connection.execute("SELECT SUM(LENGTH(value)) FROM cluster").fetchone()
        with pytest.raises(DatabaseDamagedError):
            database.write(lambda tx: tx.execute("DELETE FROM cluster"))

        assert "is damaged" in database.describe_damage()
        with database.read() as connection:
            assert connection.execute("SELECT COUNT(*) FROM users").fetchone()[0] == 0
