"""Group commits of the writer thread, and isolation of readers from it."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dstrial.errors import MasterError
from dstrial.master.store.database import Database, Transaction
from dstrial.master.store.sqlite_file import SCHEMA_VERSION


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    with contextlib.closing(Database(tmp_path / "master.db")) as opened:
        yield opened


def put(key: str, value: str):
    def write(tx: Transaction) -> str:
        tx.execute("INSERT INTO cluster VALUES (?, ?)", (key, value))
        tx.publish(f"key:{key}")
        return key

    return write


def keys(database: Database) -> set[str]:
    with database.read() as connection:
        return {row["key"] for row in connection.execute("SELECT key FROM cluster")}


def test_failed_write_in_group_is_rolled_back_alone(database: Database) -> None:
    gate = threading.Event()
    first = database.submit(lambda tx: gate.wait(10))

    def fail_after_insert(tx: Transaction) -> None:
        put("b", "2")(tx)
        raise ValueError("no")

    futures = [
        database.submit(put("a", "1")),
        database.submit(fail_after_insert),
        database.submit(put("c", "3")),
    ]
    gate.set()

    assert first.result(10)
    assert futures[0].result(10) == "a"
    with pytest.raises(ValueError, match="no"):
        futures[1].result(10)
    assert futures[2].result(10) == "c"
    assert keys(database) == {"a", "c"}


def test_topics_are_published_only_after_commit(tmp_path: Path) -> None:
    seen: list[tuple[set[str], set[str]]] = []
    other: list[Database] = []
    database = Database(tmp_path / "master.db", lambda topics: seen.append((topics, keys(other[0]))))
    other.append(database)

    database.write(put("a", "1"))
    with pytest.raises(sqlite3.IntegrityError):
        database.write(put("a", "2"))

    assert seen == [({"key:a"}, {"a"})]
    database.close()


def test_write_succeeds_if_notifying_fails_after_commit(tmp_path: Path) -> None:
    """An error would make the client retry the write and store the row twice."""

    def notify(topics: set[str]) -> None:
        raise RuntimeError("the event loop is closed")

    database = Database(tmp_path / "master.db", notify)

    assert database.submit(put("a", "1")).result(10) == "a"
    assert database.submit(put("b", "2")).result(10) == "b"
    assert keys(database) == {"a", "b"}
    database.close()


def test_read_is_snapshot_during_concurrent_write(database: Database) -> None:
    database.write(put("a", "1"))

    with database.read() as connection:
        before = connection.execute("SELECT count(*) FROM cluster").fetchone()[0]
        database.write(put("b", "2"))
        after = connection.execute("SELECT count(*) FROM cluster").fetchone()[0]

    assert before == after == 1
    assert keys(database) == {"a", "b"}


def test_read_connection_rejects_writes(database: Database) -> None:
    with pytest.raises(sqlite3.OperationalError, match="readonly"), database.read() as connection:
        connection.execute("INSERT INTO cluster VALUES ('a', '1')")


def test_reads_of_many_threads_share_few_connections(database: Database) -> None:
    keys(database)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(100):
        thread = threading.Thread(target=keys, args=(database,))
        thread.start()
        thread.join()
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 2


def test_nested_reads_do_not_block(database: Database) -> None:
    with contextlib.ExitStack() as stack:
        outer = [stack.enter_context(database.read()) for _ in range(20)]
        database.write(put("a", "1"))
        assert keys(database) == {"a"}
        assert len(set(map(id, outer))) == len(outer)


def test_close_finishes_pending_writes_and_rejects_new(tmp_path: Path) -> None:
    database = Database(tmp_path / "master.db")
    futures = [database.submit(put(str(number), "")) for number in range(1000)]

    database.close()

    assert [future.result(0) for future in futures] == [str(number) for number in range(1000)]
    with pytest.raises(MasterError, match="is closed"):
        database.submit(put("x", ""))
    again = Database(tmp_path / "master.db")
    assert len(keys(again)) == 1000
    again.close()


@pytest.mark.parametrize("version", [SCHEMA_VERSION - 1, SCHEMA_VERSION + 1])
def test_database_of_other_schema_version_is_refused(tmp_path: Path, version: int) -> None:
    with sqlite3.connect(tmp_path / "master.db") as connection:
        connection.execute(f"PRAGMA user_version = {version}")

    with pytest.raises(MasterError, match=f"schema version {version}; expected {SCHEMA_VERSION}. Start"):
        Database(tmp_path / "master.db")
