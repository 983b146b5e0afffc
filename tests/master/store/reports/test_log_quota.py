"""Log quota: deletion of the oldest lines and the master's notes about it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from rows import add

from dstrial.master.store.database import Database, Transaction
from dstrial.master.store.reports import logs
from dstrial.master.store.reports.logs import LogLine, LogOwner

QUOTA = 2**16
TRIAL = LogOwner("1.request", 7, "1.request.1")
COMMAND = LogOwner("command", None, "command.1")


class Log:
    """A log in a database of its own, to which numbered lines are added."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.num_printed = 0

    def print(self, count: int, owner: LogOwner = TRIAL) -> None:
        lines = [
            LogLine(1, "stdout", None, 0, f"line {self.num_printed + number}\n") for number in range(count)
        ]
        self.num_printed += count
        self.database.write(lambda tx: logs.add_lines(tx, owner, lines, QUOTA))

    def rows(self, owner: LogOwner = TRIAL) -> list[logs.StoredLine]:
        wanted = logs.LogFilter(trial_id=owner.trial_id, task_id=owner.task_id)
        with self.database.read() as connection:
            return logs.query(connection, wanted)

    def printed(self, owner: LogOwner = TRIAL) -> list[int]:
        """Return the numbers of the lines that are still stored, in log order."""
        return [int(row.log.split()[1]) for row in self.rows(owner) if row.source == "task"]

    def master_lines(self, owner: LogOwner = TRIAL) -> list[str]:
        """Return the lines that the master itself has added to the log."""
        return [row.log.rstrip("\n") for row in self.rows(owner) if row.source == "master"]


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    database = Database(tmp_path / "master.db")
    yield Log(database)
    database.close()


def size_of(log: Log) -> int:
    with log.database.read() as connection:
        return int(
            connection.execute(
                "SELECT COALESCE(SUM(LENGTH(log) + LENGTH(task_id) + LENGTH(allocation_id)), 0) FROM logs"
            ).fetchone()[0]
        )


def test_log_within_quota_is_kept_whole(log: Log) -> None:
    log.print(100)
    log.print(100)

    assert log.printed() == list(range(200))
    assert log.master_lines() == []


@pytest.mark.parametrize("at_once", [1, 7, 100, 3000])
@pytest.mark.parametrize("owner", [TRIAL, COMMAND])
def test_log_over_quota_keeps_newest_lines(log: Log, owner: LogOwner, at_once: int) -> None:
    while log.num_printed < 3000:
        log.print(min(at_once, 3000 - log.num_printed), owner)

    kept = log.printed(owner)
    assert kept == [*range(3000 - len(kept), 3000)]
    assert 340 < len(kept) < 410, "64 KiB, 160 to 190 bytes each"
    assert size_of(log) < QUOTA
    assert log.master_lines(owner) == [
        "the log is larger than limits.trial_log_bytes of the master's settings, 65,536 bytes: its oldest lines are left out",
    ]


def test_empty_lines_count_row_overhead_against_quota(log: Log) -> None:
    lines = [LogLine(1, "stdout", None, None, "\n")] * 2000
    log.database.write(lambda tx: logs.add_lines(tx, TRIAL, lines, QUOTA))

    assert len([row for row in log.rows() if row.source == "task"]) == QUOTA // 161


def test_line_larger_than_quota_drops_itself_and_predecessors(log: Log) -> None:
    log.print(10)
    huge = LogLine(1, "stdout", None, None, "x" * 2 * QUOTA + "\n")
    log.database.write(lambda tx: logs.add_lines(tx, TRIAL, [huge], QUOTA))
    log.print(10)

    assert log.printed() == list(range(10, 20))


def test_space_of_dropped_lines_is_reused(log: Log) -> None:
    def num_pages() -> int:
        with log.database.read() as connection:
            return int(connection.execute("PRAGMA page_count").fetchone()[0])

    while log.num_printed < 3000:
        log.print(100)
    before = num_pages()
    while log.num_printed < 20_000:
        log.print(100)

    assert num_pages() <= before + 8


def test_quota_restarts_after_expired_log_is_deleted(log: Log) -> None:
    log.print(3000, COMMAND)

    def end(tx: Transaction) -> None:
        add(tx, "users", id=1, username="determined")
        add(tx, "commands", task_id="command", state="COMPLETED", end_us=1)
        logs.forget_old(tx, 1)

    log.database.write(end)
    log.num_printed = 0
    log.print(100, COMMAND)

    assert log.printed(COMMAND) == list(range(100))
    assert log.master_lines(COMMAND) == []
