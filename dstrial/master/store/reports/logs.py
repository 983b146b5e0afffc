"""Log lines: output of task processes, and the master's messages about tasks."""

from __future__ import annotations

import dataclasses
import sqlite3
from collections.abc import Sequence

from dstrial.master.clock import format_us, now_us
from dstrial.master.store.database import Conditions, Transaction, fetch_all, fetch_value
from dstrial.visible_text import visible

_DAY_US = 24 * 3600 * 1_000_000
# Overhead of a row besides its text (ids, time, index); measured: 140 to 170 bytes.
_ROW_BYTES = 160
_MAX_DELETED = 50_000  # lines per call, so that the writer thread is not blocked; ``add_lines`` adds fewer
MAX_LINES = 1000  # per page
MAX_BYTES = 2000  # per line in a page
MAX_SEARCHED = 200_000  # lines scanned per request; see LogPage.searched_to
LEVELS = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


@dataclasses.dataclass(frozen=True, slots=True)
class StoredLine:
    id: int
    task_id: str
    trial_id: int | None
    allocation_id: str | None
    time_us: int
    level: str | None
    rank: int | None
    source: str
    stdtype: str | None
    log: str
    container_id: str | None


@dataclasses.dataclass(frozen=True, slots=True)
class LogLine:
    """A log line printed by a process."""

    time_us: int
    stdtype: str | None  # "stdout" or "stderr"
    level: str | None  # parsed from the text; None if absent
    rank: int | None  # parsed from the tag ``[rank=0]``; None if absent
    text: str  # without tag and level, with newline


@dataclasses.dataclass(frozen=True, slots=True)
class LogKey:
    """Key of a log: the trial id (a trial's tasks share one log), else the task id."""

    task_id: str | None = None
    trial_id: int | None = None

    @property
    def condition(self) -> str:
        return "trial_id = ?" if self.trial_id is not None else "trial_id IS NULL AND task_id = ?"

    @property
    def value(self) -> int | str | None:
        return self.task_id if self.trial_id is None else self.trial_id


@dataclasses.dataclass(frozen=True, slots=True)
class LogFilter:
    """Filter of a task's or trial's log lines; None and empty fields match all lines."""

    trial_id: int | None = None
    task_id: str | None = None  # for tasks without a trial
    after_id: int | None = None
    limit: int | None = None
    is_descending: bool = False
    allocation_ids: tuple[str, ...] = ()
    agent_ids: tuple[str, ...] = ()  # agent names
    agent_id: str = ""  # name of the master's own agent
    container_ids: tuple[str, ...] = ()
    rank_ids: tuple[int, ...] = ()  # -1: lines without a rank
    sources: tuple[str, ...] = ()  # "task", "master"
    stdtypes: tuple[str, ...] = ()
    levels: tuple[str, ...] = ()  # lines without a level count as INFO
    before_us: int | None = None
    after_us: int | None = None
    search_text: str = ""


def add_task_logs(
    tx: Transaction, task_id: str, trial_id: int | None, allocation_id: str | None, lines: Sequence[LogLine]
) -> None:
    if not lines:
        return
    tx.executemany(
        "INSERT INTO logs (task_id, trial_id, allocation_id, time_us, level, rank, source, stdtype, log) "
        "VALUES (?, ?, ?, ?, ?, ?, 'task', ?, ?)",
        [
            (task_id, trial_id, allocation_id, line.time_us, line.level, line.rank, line.stdtype, line.text)
            for line in lines
        ],
    )
    _publish(tx, task_id, trial_id)


def add_master_line(
    tx: Transaction,
    task_id: str,
    trial_id: int | None,
    text: str,
    *,
    level: str = "INFO",
    allocation_id: str | None = None,
) -> None:
    """Append a message (without newline) of the master to the log of a task."""
    columns = {"task_id": task_id, "trial_id": trial_id, "allocation_id": allocation_id, "level": level}
    tx.insert("logs", {**columns, "time_us": now_us(), "source": "master", "log": f"{text}\n"})
    _publish(tx, task_id, trial_id)


def _publish(tx: Transaction, task_id: str, trial_id: int | None) -> None:
    tx.publish(f"logs:{task_id}")
    if trial_id is not None:
        tx.publish(f"logs:trial:{trial_id}")


@dataclasses.dataclass(frozen=True, slots=True)
class LogOwner(LogKey):
    """Key of a log to which lines are added, with the allocation that printed them."""

    task_id: str
    allocation_id: str | None = None  # None for lines from other nodes


def add_lines(tx: Transaction, owner: LogOwner, lines: Sequence[LogLine], quota_bytes: int) -> None:
    """Store log lines; if the log exceeds ``quota_bytes``, delete its oldest lines."""
    num_bytes, is_cut = _size_of(tx, owner)
    add_task_logs(tx, owner.task_id, owner.trial_id, owner.allocation_id, lines)
    num_bytes += sum(len(line.text.encode()) + _ROW_BYTES for line in lines)
    if num_bytes > quota_bytes:
        num_bytes -= _delete_oldest(tx, owner, num_bytes - quota_bytes)
        if not is_cut:
            text = f"the log is larger than limits.trial_log_bytes of the master's settings, {quota_bytes:,} bytes"
            _add_warning(tx, owner, f"{text}: its oldest lines are left out")
        is_cut = True
    tx.execute(
        f"UPDATE log_sizes SET num_bytes = ?, is_cut = ? WHERE {owner.condition}",  # noqa: S608 - one of two
        (num_bytes, is_cut, owner.value),
    )


def _add_warning(tx: Transaction, owner: LogOwner, text: str) -> None:
    add_master_line(
        tx, owner.task_id, owner.trial_id, text, level="WARNING", allocation_id=owner.allocation_id
    )


def _size_of(tx: Transaction, owner: LogOwner) -> tuple[int, bool]:
    """Return (size in bytes, whether oldest lines were deleted) of a log.

    A log without a row in ``log_sizes`` gets one.
    """
    sql = f"SELECT num_bytes, is_cut FROM log_sizes WHERE {owner.condition}"  # noqa: S608 - one of two
    row = tx.execute(sql, (owner.value,)).fetchone()
    if row is None:
        tx.insert("log_sizes", {"task_id": owner.task_id, "trial_id": owner.trial_id, "num_bytes": 0})
        return 0, False
    return int(row["num_bytes"]), bool(row["is_cut"])


def _delete_oldest(tx: Transaction, owner: LogOwner, excess_bytes: int) -> int:
    """Delete a log's oldest printed lines until ``excess_bytes`` are freed.

    Returns the freed bytes. Messages of the master are kept. One call deletes at most ``_MAX_DELETED`` lines.
    """
    of_log = f"{owner.condition} AND source = 'task'"
    rows = tx.execute(
        f"SELECT id, LENGTH(CAST(log AS BLOB)) + ? AS bytes FROM logs WHERE {of_log} ORDER BY id LIMIT ?",  # noqa: S608 - one of two
        (_ROW_BYTES, owner.value, _MAX_DELETED),
    )
    freed_bytes = last_id = 0
    for row in rows:
        freed_bytes, last_id = freed_bytes + int(row["bytes"]), int(row["id"])
        if freed_bytes >= excess_bytes:
            break
    rows.close()
    tx.execute(f"DELETE FROM logs WHERE {of_log} AND id <= ?", (owner.value, last_id))  # noqa: S608 - one of two
    return freed_bytes


_SELECT = (
    "SELECT logs.*, allocations.resources_id AS container_id FROM logs "
    "LEFT JOIN allocations ON allocations.id = logs.allocation_id"
)


def query(connection: sqlite3.Connection, wanted: LogFilter) -> list[StoredLine]:
    if wanted.agent_ids and wanted.agent_id not in wanted.agent_ids:
        return []
    where = Conditions()
    if wanted.trial_id is not None:
        where.need("logs.trial_id = ?", wanted.trial_id)
    else:
        where.need("logs.task_id = ?", wanted.task_id)
    if wanted.agent_ids:
        where.need("logs.allocation_id IS NOT NULL")
    where.need_one_of("logs.allocation_id", wanted.allocation_ids)
    where.need_one_of("allocations.resources_id", wanted.container_ids)
    where.need_one_of("logs.source", wanted.sources)
    where.need_one_of("logs.stdtype", wanted.stdtypes)
    need_levels_and_ranks(where, wanted.levels, wanted.rank_ids)
    for condition, value in (
        ("logs.time_us < ?", wanted.before_us),
        ("logs.time_us > ?", wanted.after_us),
        ("logs.id > ?", wanted.after_id),
        ("instr(logs.log, ?) > 0", wanted.search_text or None),
    ):
        if value is not None:
            where.need(condition, value)
    order = "DESC" if wanted.is_descending else "ASC"
    limit = -1 if wanted.limit is None else wanted.limit
    sql = f"{_SELECT} {where.sql} ORDER BY logs.id {order} LIMIT ?"
    return fetch_all(StoredLine, connection, sql, (*where.values, limit))


def need_levels_and_ranks(where: Conditions, levels: Sequence[str], ranks: Sequence[int]) -> None:
    """Add conditions on levels and ranks to ``where``; empty sequences add none.

    Lines without a level count as INFO. Rank -1 stands for lines without a rank.
    """
    where.need_one_of("logs.level", levels, or_null="INFO" in levels)
    where.need_one_of("logs.rank", ranks, or_null=-1 in ranks)


@dataclasses.dataclass(frozen=True, slots=True)
class PageFilter:
    """Position, size and filter of a page of log lines."""

    before: int | None = None  # the last lines before this id; None with ``after``
    after: int | None = None  # the first lines after this id; None for the newest lines
    limit: int = 200
    level: str | None = None  # minimum level; lines without a level count as INFO
    ranks: tuple[int, ...] = ()  # -1: lines without a rank
    text: str = ""  # substring, case-insensitive


@dataclasses.dataclass(frozen=True, slots=True)
class ShownLine:
    """A log line, truncated to ``MAX_BYTES`` if it is longer."""

    id: int
    time_us: int
    level: str | None
    rank: int | None
    source: str
    stdtype: str | None
    text: str
    num_bytes: int  # of the untruncated line, without newline

    @property
    def is_cut(self) -> bool:
        return self.num_bytes > MAX_BYTES


@dataclasses.dataclass(frozen=True, slots=True)
class LogPage:
    """A page of log lines, and where the next page starts."""

    lines: list[ShownLine]  # oldest first
    searched_to: int | None  # line id at which a limit stopped the scan; None if complete
    last: int  # id of the log's newest line; 0 if empty


def page(connection: sqlite3.Connection, log: LogKey, wanted: PageFilter) -> LogPage:
    """Return the page of log lines that ``wanted`` selects.

    With a filter, at most ``MAX_SEARCHED`` lines are scanned; the page may then have fewer lines than requested. The next page
    starts at ``LogPage.searched_to``.
    """
    is_back = wanted.after is None
    where = Conditions()
    where.need(log.condition, log.value)
    if not is_back:
        where.need("id > ?", wanted.after)
    elif wanted.before is not None:
        where.need("id < ?", wanted.before)
    order = "DESC" if is_back else "ASC"
    edge = None
    levels = LEVELS[LEVELS.index(wanted.level) :] if wanted.level in LEVELS else ()
    if levels or wanted.ranks or wanted.text:
        # Find the end of the scan with an index-only query, before reading any text.
        sql = f"SELECT id FROM logs {where.sql} ORDER BY id {order} LIMIT 1 OFFSET {MAX_SEARCHED - 1}"  # noqa: S608 - constants
        edge = fetch_value(int, connection, sql, where.values)
        if edge is not None:
            where.need("id >= ?" if is_back else "id <= ?", edge)
        need_levels_and_ranks(where, levels, wanted.ranks)
        where.need_part("log", wanted.text)  # lower() ignores the case of ASCII letters only
    # Read the text as BLOB, as SQLite's string functions stop at a NUL character.
    rows = connection.execute(
        "SELECT id, time_us, level, rank, source, stdtype, substr(CAST(log AS BLOB), 1, ?) AS start, "  # noqa: S608 - constants
        f"length(CAST(log AS BLOB)) AS num_bytes FROM logs {where.sql} ORDER BY id {order} LIMIT ?",
        (MAX_BYTES + 1, *where.values, wanted.limit),
    ).fetchall()
    lines = [_shown(row) for row in rows]
    searched_to = lines[-1].id if len(lines) == wanted.limit else edge
    if is_back:
        lines.reverse()
    newest = f"SELECT MAX(id) FROM logs WHERE {log.condition}"  # noqa: S608 - a constant
    return LogPage(lines, searched_to, fetch_value(int, connection, newest, (log.value,)) or 0)


def _shown(row: sqlite3.Row) -> ShownLine:
    start, num_bytes = bytes(row["start"]), int(row["num_bytes"])
    if num_bytes == len(start) and start.endswith(b"\n"):
        start, num_bytes = start[:-1], num_bytes - 1
    text = start[:MAX_BYTES].decode("utf-8", "ignore")
    return ShownLine(
        row["id"], row["time_us"], row["level"], row["rank"], row["source"], row["stdtype"], text, num_bytes
    )


def format_message(row: StoredLine) -> str:
    """Format a line like Determined's master, with control characters escaped.

    ``[2026-11-21T02:00:00.000000Z] 1a2b3c4d [rank=0] || INFO: text``, with newline.
    Source: Determined 0.38.1, format of task logs.
    """
    container = f"{(row.container_id or '')[:8]:8} " if row.container_id else ""
    rank = "" if row.rank is None else f"[rank={row.rank}] "
    level = "" if row.level is None else f"{row.level}: "
    text = shown_text(row)
    end = "" if text.endswith("\n") else "\n"
    return f"[{format_us(row.time_us)}] {container}{rank}|| {level}{text}{end}"


def shown_text(row: StoredLine) -> str:
    """Return a line's text with control characters escaped, except NUL."""
    return "\0".join(visible(part) for part in row.log.split("\0"))


_DAYS = "COALESCE(trials.log_retention_days, experiments.log_retention_days, :default)"
"""SQL expression: retention of a trial's logs in days, -1 for forever."""


def forget_old(tx: Transaction, default_days: int | None) -> int:
    """Delete expired logs and expired uploads of commands; return the number of lines.

    The result counts deleted log lines. ``default_days`` is the retention if neither the trial nor its experiment sets one;
    None and -1 mean forever.
    """
    values = {"default": -1 if default_days is None else default_days, "now": now_us(), "day": _DAY_US}
    of_trials = (
        "trial_id IN (SELECT trials.id FROM trials "  # noqa: S608 - a constant
        "JOIN experiments ON experiments.id = trials.experiment_id WHERE trials.end_us IS NOT NULL "
        f"AND {_DAYS} >= 0 AND trials.end_us < :now - {_DAYS} * :day)"
    )
    ended = "SELECT task_id FROM commands WHERE end_us IS NOT NULL AND :default >= 0 AND end_us < :now - :default * :day"
    of_commands = f"trial_id IS NULL AND task_id IN ({ended})"
    count = 0
    for condition in (of_trials, of_commands):
        count += tx.execute(f"DELETE FROM logs WHERE {condition}", values).rowcount  # noqa: S608 - a constant
        tx.execute(f"DELETE FROM log_sizes WHERE {condition}", values)  # noqa: S608 - a constant
    tx.execute(f"DELETE FROM command_contexts WHERE task_id IN ({ended})", values)  # noqa: S608 - a constant
    return count
