"""The log is moved into the database when nobody writes, and what must last is on the disk before anybody is told."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import wait_for

from dstrial.master.store.database import Database, Transaction, make_cluster_id
from dstrial.master.store.file import log_keeper, marks, page_checksums, wal


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    with contextlib.closing(Database(tmp_path / "master.db")) as made:
        made.write(make_cluster_id)
        yield made


def put(tx: Transaction) -> None:
    tx.execute("INSERT INTO cluster VALUES (hex(randomblob(8)), '')")


def put_to_last(tx: Transaction) -> None:
    put(tx)
    tx.must_last()


def stored(database: Database) -> marks.Marks:
    found = marks.read(marks.path_of(database.path))
    assert found is not None
    return found


def log_of(database: Database) -> wal.Scan:
    found = wal.scan(database.path.with_name("master.db-wal").read_bytes())
    assert found is not None
    return found


def test_only_what_must_last_is_synced_and_before_it_is_told_of(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)

    database.write(put)
    assert synced == []
    assert stored(database).num_synced < stored(database).num_frames

    future = database.submit(put_to_last)
    future.add_done_callback(lambda _: synced.append("told"))
    future.result(30)
    assert synced == ["master.db-wal", "told"]
    assert stored(database).num_synced == stored(database).num_frames


def test_the_marks_say_what_sqlite_would_take_of_the_log(database: Database) -> None:
    for _ in range(30):
        database.write(put)
        found, log = stored(database), log_of(database)
        assert (found.salt, found.num_frames) == (log.salt, log.num_committed)


def test_what_follows_a_large_function_that_failed_is_not_lost_by_a_kill(
    database: Database, tmp_path: Path
) -> None:
    """SQLite 3.40.1 writes it without checksums, and drops it at the next start."""

    def fill_the_cache_and_fail(tx: Transaction) -> None:
        for _ in range(8000):
            tx.execute("INSERT INTO cluster VALUES (hex(randomblob(8)), hex(randomblob(1500)))")
        raise ValueError("no")

    database.write(put)
    with pytest.raises(ValueError, match="no"):
        database.write(fill_the_cache_and_fail)
    for _ in range(3):
        database.write(put)

    found, log = stored(database), log_of(database)
    assert (found.salt, found.num_frames) == (log.salt, log.num_committed)
    (tmp_path / "killed").mkdir()
    for end in ("", "-wal"):
        shutil.copy(database.path.with_name(f"master.db{end}"), tmp_path / "killed")
    with contextlib.closing(sqlite3.connect(tmp_path / "killed" / "master.db")) as connection:
        assert connection.execute("SELECT COUNT(*) FROM cluster").fetchone()[0] == 5


def test_an_idle_database_is_whole_in_its_file_alone(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_keeper, "_IDLE_S", 0.1)
    for _ in range(20):
        database.write(put)

    wait_for(lambda: not database.path.with_name("master.db-wal").stat().st_size)

    shutil.copy(database.path, tmp_path / "alone.db")
    with contextlib.closing(sqlite3.connect(tmp_path / "alone.db")) as connection:
        assert connection.execute("SELECT COUNT(*) FROM cluster").fetchone()[0] == 21


def test_a_log_that_is_never_idle_is_moved_from_time_to_time(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_keeper, "_MAX_AGE_S", 0.5)
    before = database.path.stat().st_mtime_ns

    def is_moved() -> bool:
        database.write(put)
        return database.path.stat().st_mtime_ns > before

    wait_for(is_moved)


def test_a_long_log_is_moved_while_others_write(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_keeper, "_FOLD_FRAMES", 50)
    monkeypatch.setattr(log_keeper, "_FOLD_PERIOD_S", 0.1)
    first = stored(database).salt

    def is_begun_anew() -> bool:
        for _ in range(10):
            database.write(put)
        return stored(database).salt != first

    wait_for(is_begun_anew)
    assert stored(database).num_frames < 50


def test_a_reader_that_stays_does_not_hold_up_the_writer_or_the_checksums(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_keeper, "_IDLE_S", 0.05)
    with database.read() as connection:
        assert connection.execute("SELECT COUNT(*) FROM cluster").fetchone()[0] == 1
        for _ in range(20):
            database.write(put)
            time.sleep(0.02)
        assert connection.execute("SELECT COUNT(*) FROM cluster").fetchone()[0] == 1
    database.close()

    assert page_checksums.read(page_checksums.path_of(database.path)) == page_checksums.of_file(database.path)
    with contextlib.closing(Database(database.path)) as again:
        assert again.notes == ()


def test_a_schema_is_in_the_file_at_once(tmp_path: Path) -> None:
    with contextlib.closing(Database(tmp_path / "master.db")):
        shutil.copy(tmp_path / "master.db", tmp_path / "alone.db")
    with contextlib.closing(sqlite3.connect(tmp_path / "alone.db")) as connection:
        names = {row[0] for row in connection.execute("SELECT name FROM sqlite_master")}
    assert "experiments" in names


def test_a_closed_database_is_marked_as_closed(tmp_path: Path) -> None:
    with contextlib.closing(Database(tmp_path / "master.db")) as database:
        assert stored(database).is_open
    assert not stored(database).is_open
    assert not list(tmp_path.glob("*-wal"))


def test_a_database_that_is_closed_while_a_request_reads_is_taken_again(tmp_path: Path) -> None:
    path = tmp_path / "master.db"
    database = Database(path)
    reads, is_over = threading.Event(), threading.Event()

    def read() -> None:
        with contextlib.suppress(sqlite3.ProgrammingError), database.read() as connection:  # it is closed
            connection.execute("SELECT COUNT(*) FROM cluster").fetchone()
            reads.set()
            is_over.wait(60)

    reader = threading.Thread(target=read)
    reader.start()
    assert reads.wait(60)
    database.write(put)
    database.close()
    is_over.set()
    reader.join()

    with contextlib.closing(Database(path)) as again, again.read() as connection:
        assert again.notes == ()
        assert connection.execute("SELECT COUNT(*) FROM cluster").fetchone()[0] == 1


def test_a_log_that_somebody_reads_to_the_end_stays_beside_the_database(tmp_path: Path) -> None:
    """SQLite moves a log by itself when the last connection is closed, and the marks would not say so."""
    path = tmp_path / "master.db"
    database = Database(path)
    other = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
    other.execute("BEGIN")
    other.execute("SELECT COUNT(*) FROM cluster").fetchone()
    database.write(put)
    asked: list[str] = []

    def close_after_the_last_fold(statement: str) -> None:
        if "wal_checkpoint" in statement:
            asked.append(statement)
        elif asked and "busy_timeout =" in statement:
            other.close()

    database._writer_connection.set_trace_callback(close_after_the_last_fold)
    database.close()
    assert asked

    with contextlib.closing(Database(path)) as again, again.read() as connection:
        assert again.notes == ()
        assert connection.execute("SELECT COUNT(*) FROM cluster").fetchone()[0] == 1
