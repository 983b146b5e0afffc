"""Enforces the size quota of a log by deleting its oldest lines."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from dstrial.master.store.database import Transaction, fetch_one
from dstrial.master.store.reports.logs import LogKey, LogLine, add_master_line, add_task_logs

# Overhead of a row besides its text (ids, time, index); measured: 140 to 170 bytes.
_ROW_BYTES = 160
_MAX_DELETED = 50_000  # lines per call, so that the writer thread is not blocked; ``add_lines`` adds fewer


@dataclasses.dataclass(frozen=True, slots=True)
class LogSize:
    """A row of table ``log_sizes``, documented in ``schema.sql``."""

    id: int
    task_id: str
    trial_id: int | None
    num_bytes: int
    num_left_out: int
    is_cut: bool


@dataclasses.dataclass(frozen=True, slots=True)
class LogOwner(LogKey):
    """Key of a log, and the task and allocation that printed the lines to be added."""

    task_id: str
    allocation_id: str | None = None  # None for lines from other nodes


def add_lines(
    tx: Transaction, owner: LogOwner, lines: Sequence[LogLine], quota_bytes: int, *, num_lost: int = 0
) -> None:
    """Store log lines; if the log exceeds ``quota_bytes``, delete its oldest lines.

    ``num_lost`` is the number of preceding lines that were lost before the master could read them.
    """
    size = _size_of(tx, owner)
    num_left_out = size.num_left_out + num_lost
    if num_lost:
        why = "they were printed while the master was down, or faster than it reads"
        _log_line(tx, owner, f"{_lines(num_lost)} left out here: {why}")
    add_task_logs(tx, owner.task_id, owner.trial_id, owner.allocation_id, lines)
    num_bytes = size.num_bytes + sum(len(line.text.encode()) + _ROW_BYTES for line in lines)
    is_cut = size.is_cut or num_bytes > quota_bytes
    if num_bytes > quota_bytes:
        num_deleted, freed_bytes = _delete_oldest(tx, owner, num_bytes - quota_bytes)
        if not size.is_cut:
            text = f"the log is larger than limits.trial_log_bytes of the master's settings, {quota_bytes:,} bytes"
            _log_line(tx, owner, f"{text}: its oldest lines are left out")
        num_left_out, num_bytes = num_left_out + num_deleted, num_bytes - freed_bytes
    new = {"num_bytes": num_bytes, "num_left_out": num_left_out, "is_cut": is_cut}
    tx.update("log_sizes", size.id, new)


def tell_at_end(tx: Transaction, owner: LogOwner) -> None:
    """Append the number of deleted and lost lines, unless it is 0, to a finished log."""
    size = _find_size(tx, owner)
    if size is not None and size.num_left_out:
        _log_line(tx, owner, f"{_lines(size.num_left_out)} left out of this log")


def _find_size(tx: Transaction, owner: LogOwner) -> LogSize | None:
    sql = f"SELECT * FROM log_sizes WHERE {owner.condition}"  # noqa: S608 - one of two
    return fetch_one(LogSize, tx.connection, sql, (owner.value,))


def _size_of(tx: Transaction, owner: LogOwner) -> LogSize:
    if _find_size(tx, owner) is None:
        tx.insert("log_sizes", {"task_id": owner.task_id, "trial_id": owner.trial_id, "num_bytes": 0})
    found = _find_size(tx, owner)
    assert found is not None
    return found


def _delete_oldest(tx: Transaction, owner: LogOwner, excess_bytes: int) -> tuple[int, int]:
    """Delete the oldest lines that processes printed; return (number, freed bytes)."""
    of_log = f"{owner.condition} AND source = 'task'"
    rows = tx.execute(
        f"SELECT id, LENGTH(CAST(log AS BLOB)) + ? AS bytes FROM logs WHERE {of_log} ORDER BY id LIMIT ?",  # noqa: S608 - one of two
        (_ROW_BYTES, owner.value, _MAX_DELETED),
    )
    number = freed_bytes = last_id = 0
    for row in rows:
        number, freed_bytes, last_id = number + 1, freed_bytes + int(row["bytes"]), int(row["id"])
        if freed_bytes >= excess_bytes:
            break
    rows.close()
    tx.execute(f"DELETE FROM logs WHERE {of_log} AND id <= ?", (owner.value, last_id))  # noqa: S608 - one of two
    return number, freed_bytes


def _log_line(tx: Transaction, owner: LogOwner, text: str) -> None:
    add_master_line(
        tx, owner.task_id, owner.trial_id, text, level="WARNING", allocation_id=owner.allocation_id
    )


def _lines(count: int) -> str:
    return f"{count:,} line{'s are' if count != 1 else ' is'}"
