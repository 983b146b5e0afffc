"""Enforces the size quota of a log by deleting lines from its middle."""

from __future__ import annotations

import dataclasses
import sqlite3
from collections.abc import Sequence

from dstrial.master.store.database import Transaction, fetch_one
from dstrial.master.store.reports.logs import LogKey, LogLine, add_master_line, add_task_logs

# Overhead of a row besides its text (ids, time, index); measured: 140 to 170 bytes.
_ROW_BYTES = 160
_MAX_DELETED = 50_000
_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


@dataclasses.dataclass(frozen=True, slots=True)
class LogSize:
    """A row of the table ``log_sizes``; ``schema.sql`` documents the columns."""

    id: int
    task_id: str
    trial_id: int | None
    num_bytes: int
    is_head_full: bool
    tail_id: int
    marker_id: int | None
    num_left_out: int
    bytes_left_out: int


@dataclasses.dataclass(frozen=True, slots=True)
class LogOwner(LogKey):
    """Key of a log, with the task and allocation that print the added lines."""

    task_id: str
    allocation_id: str | None = None  # None on other nodes


def add_lines(
    tx: Transaction, owner: LogOwner, lines: Sequence[LogLine], quota_bytes: int, *, num_lost: int = 0
) -> None:
    """Store log lines; if the log exceeds ``quota_bytes``, delete lines of its middle.

    ``num_lost`` is the number of preceding lines that were lost before the master could read them.
    """
    size = _size_of(tx, owner)
    if num_lost:
        size = dataclasses.replace(size, num_left_out=size.num_left_out + num_lost)
        why = "they were printed while the master was down, or faster than it reads"
        _log_line(tx, owner, f"{_lines(num_lost)} left out here: {why}")
    num_head = 0 if size.is_head_full else _num_fitting(lines, quota_bytes // 2 - size.num_bytes)
    if num_head:
        add_task_logs(tx, owner.task_id, owner.trial_id, owner.allocation_id, lines[:num_head])
        # Only lines with greater ids may be deleted.
        size = dataclasses.replace(size, tail_id=_last_id(tx))
    rest = lines[num_head:]
    add_task_logs(tx, owner.task_id, owner.trial_id, owner.allocation_id, rest)
    size = dataclasses.replace(
        size,
        num_bytes=size.num_bytes + sum(map(_bytes_of, lines)),
        is_head_full=size.is_head_full or bool(rest),
    )
    if size.num_bytes > quota_bytes:
        size = _shrink(tx, owner, size, quota_bytes)
    tx.update("log_sizes", size.id, dataclasses.asdict(size))


def tell_at_end(tx: Transaction, owner: LogOwner) -> None:
    """Append the number of deleted lines to a finished log, if lines were deleted."""
    size = _find_size(tx, owner)
    if size is not None and size.num_left_out:
        _log_line(tx, owner, f"{_lines(size.num_left_out)} left out of this log")


def _find_size(tx: Transaction, owner: LogOwner) -> LogSize | None:
    sql = f"SELECT * FROM log_sizes WHERE {owner.condition}"  # noqa: S608 - one of two
    return fetch_one(LogSize, tx.connection, sql, (owner.value,))


def _size_of(tx: Transaction, owner: LogOwner) -> LogSize:
    if _find_size(tx, owner) is None:
        new = {"num_bytes": 0, "is_head_full": False, "tail_id": 0}
        tx.insert("log_sizes", {"task_id": owner.task_id, "trial_id": owner.trial_id, **new})
    found = _find_size(tx, owner)
    assert found is not None
    return found


def _lines_behind(tx: Transaction, owner: LogOwner, log_id: int) -> sqlite3.Cursor:
    return tx.execute(
        "SELECT id, LENGTH(CAST(log AS BLOB)) + ? AS bytes FROM logs "  # noqa: S608 - one of two
        f"WHERE {owner.condition} AND id > ? AND source = 'task' ORDER BY id",
        (_ROW_BYTES, owner.value, log_id),
    )


def _shrink(tx: Transaction, owner: LogOwner, size: LogSize, quota_bytes: int) -> LogSize:
    """Delete the oldest lines after the log's kept beginning; return the new size.

    Deletes at most ``_MAX_DELETED`` lines, to keep the writer thread responsive. A call of ``add_lines`` adds fewer lines.
    """
    excess = size.num_bytes - quota_bytes
    num_bytes = num_lines = 0
    first_id = last_id = size.tail_id
    rows = _lines_behind(tx, owner, size.tail_id)
    for row in rows:
        if num_bytes >= excess or num_lines == _MAX_DELETED:
            break
        first_id = first_id if num_lines else int(row["id"])
        last_id = int(row["id"])
        num_bytes += int(row["bytes"])
        num_lines += 1
    rows.close()
    if not num_lines:
        return size
    # The first deleted line becomes the marker that says how many lines are missing there.
    marker_id = size.marker_id if size.marker_id is not None else first_id
    tx.execute(
        f"DELETE FROM logs WHERE {owner.condition} AND id > ? AND id <= ? AND source = 'task' AND id != ?",  # noqa: S608 - one of two
        (owner.value, size.tail_id, last_id, marker_id),
    )
    before, after = size.bytes_left_out, size.bytes_left_out + num_bytes
    size = dataclasses.replace(
        size,
        num_bytes=size.num_bytes - num_bytes,
        tail_id=last_id,
        marker_id=marker_id,
        num_left_out=size.num_left_out + num_lines,
        bytes_left_out=after,
    )
    quota = f"limits.trial_log_bytes of the master's settings, {_in_units(quota_bytes)}"
    text = f"{_lines(size.num_left_out)} left out here: the log is larger than {quota}\n"
    marker = {"source": "master", "level": "WARNING", "rank": None, "stdtype": None, "log": text}
    tx.update("logs", marker_id, marker)
    # Clients that follow the log are already past the marker, so append a line as well.
    if not before or before // quota_bytes != after // quota_bytes:
        _log_line(
            tx,
            owner,
            f"the log is larger than {quota}: its beginning and its newest lines are kept, and "
            f"{_lines(size.num_left_out)} left out so far",
        )
    return size


def _log_line(tx: Transaction, owner: LogOwner, text: str) -> None:
    add_master_line(
        tx, owner.task_id, owner.trial_id, text, level="WARNING", allocation_id=owner.allocation_id
    )


def _num_fitting(lines: Sequence[LogLine], room: int) -> int:
    for number, line in enumerate(lines):
        room -= _bytes_of(line)
        if room < 0:
            return number
    return len(lines)


def _bytes_of(line: LogLine) -> int:
    text = line.text
    return (len(text) if text.isascii() else len(text.encode())) + _ROW_BYTES


def _last_id(tx: Transaction) -> int:
    return int(tx.execute("SELECT last_insert_rowid()").fetchone()[0])


def _lines(count: int) -> str:
    return f"{count:,} line{'s are' if count != 1 else ' is'}"


def _in_units(num_bytes: int) -> str:
    for size, unit in _UNITS:
        if num_bytes >= size:
            return f"{num_bytes / size:.4g} {unit}"
    return f"{num_bytes} bytes"
