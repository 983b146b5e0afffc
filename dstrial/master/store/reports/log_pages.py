"""Pages of a log: lines before or after a line id, with long lines truncated."""

from __future__ import annotations

import dataclasses
import sqlite3
from collections.abc import Sequence

from dstrial.master.store.database import fetch_all
from dstrial.master.store.reports.logs import LEVELS, StoredLine

MAX_LINES = 1000  # per page
MAX_BYTES = 2000  # per line in a page; ``whole_line`` returns the rest
MAX_SEARCHED = 200_000  # lines scanned per request; see LogPage.searched_to
_SAMPLE = 5000


@dataclasses.dataclass(frozen=True, slots=True)
class LogKey:
    """Key of a log: a trial (shared by its tasks), or a task without a trial."""

    trial_id: int | None = None
    task_id: str | None = None

    @property
    def condition(self) -> str:
        return "trial_id = ?" if self.trial_id is not None else "task_id = ? AND trial_id IS NULL"

    @property
    def value(self) -> int | str | None:
        return self.trial_id if self.trial_id is not None else self.task_id


@dataclasses.dataclass(frozen=True, slots=True)
class PageFilter:
    """Filter of log lines."""

    before: int | None = None  # the last lines before this id; None with ``after``
    after: int | None = None  # the first lines after this id; None for the newest lines
    limit: int = 200
    level: str | None = None  # minimum level; lines without a level count as INFO
    ranks: tuple[int, ...] = ()  # -1: lines without a rank
    text: str = ""  # substring, case-insensitive


@dataclasses.dataclass(frozen=True, slots=True)
class ShownLine:
    """A log line, possibly truncated."""

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
    """A page of log lines."""

    lines: list[ShownLine]  # oldest first
    searched_to: int | None  # line id at which a limit stopped the scan; None if complete
    last: int  # id of the log's newest line; 0 if empty


@dataclasses.dataclass(frozen=True, slots=True)
class LogExtent:
    """Size of a log."""

    first: int | None  # line id; None if empty
    last: int | None
    num_lines: int | None  # None if not counted


def page(connection: sqlite3.Connection, log: LogKey, wanted: PageFilter) -> LogPage:
    """Return a page of lines, scanning at most ``MAX_SEARCHED`` lines."""
    is_back = wanted.after is None
    conditions, values = [log.condition], list[object]([log.value])
    if is_back and wanted.before is not None:
        conditions.append("id < ?")
        values.append(wanted.before)
    if not is_back:
        conditions.append("id > ?")
        values.append(wanted.after)
    order = "DESC" if is_back else "ASC"
    where = " AND ".join(conditions)
    wants, given = _wants(wanted)
    # Find the end of the scan with an index-only query, before reading any text.
    edge = _id_at(connection, where, values, order, MAX_SEARCHED - 1) if given else None
    if edge is not None:
        where += " AND id >= ?" if is_back else " AND id <= ?"
        values.append(edge)
    # As BLOB: SQLite's string functions stop at a NUL character.
    rows = connection.execute(
        "SELECT id, time_us, level, rank, source, stdtype, substr(CAST(log AS BLOB), 1, ?) AS start, "  # noqa: S608 - constants
        f"length(CAST(log AS BLOB)) AS num_bytes FROM logs WHERE {where} AND {wants} ORDER BY id {order} LIMIT ?",
        (MAX_BYTES + 1, *values, *given, wanted.limit),
    ).fetchall()
    lines = [_shown(row) for row in rows]
    searched_to = lines[-1].id if len(lines) == wanted.limit else edge
    if is_back:
        lines.reverse()
    return LogPage(lines, searched_to, _id_at(connection, log.condition, [log.value], "DESC", 0) or 0)


def _shown(row: sqlite3.Row) -> ShownLine:
    start, num_bytes = bytes(row["start"]), int(row["num_bytes"])
    if num_bytes == len(start) and start.endswith(b"\n"):
        start, num_bytes = start[:-1], num_bytes - 1
    text = start[:MAX_BYTES].decode("utf-8", "ignore")
    return ShownLine(
        row["id"], row["time_us"], row["level"], row["rank"], row["source"], row["stdtype"], text, num_bytes
    )


def _wants(wanted: PageFilter) -> tuple[str, list[object]]:
    conditions, values = ["1"], list[object]()
    if wanted.level in LEVELS:
        levels = LEVELS[LEVELS.index(wanted.level) :]
        none = " OR level IS NULL" if "INFO" in levels else ""
        conditions.append(f"(level IN ({', '.join('?' * len(levels))}){none})")
        values.extend(levels)
    if wanted.ranks:
        none = " OR rank IS NULL" if -1 in wanted.ranks else ""
        conditions.append(f"(rank IN ({', '.join('?' * len(wanted.ranks))}){none})")
        values.extend(wanted.ranks)
    if wanted.text:
        # Both LIKE and lower() ignore the case of ASCII letters only.
        conditions.append("instr(lower(log), lower(?)) > 0")
        values.append(wanted.text)
    return " AND ".join(conditions), values


def _id_at(
    connection: sqlite3.Connection, where: str, values: Sequence[object], order: str, offset: int
) -> int | None:
    row = connection.execute(
        f"SELECT id FROM logs WHERE {where} ORDER BY id {order} LIMIT 1 OFFSET ?",  # noqa: S608 - constants
        (*values, offset),
    ).fetchone()
    return None if row is None else int(row["id"])


def extent(connection: sqlite3.Connection, log: LogKey, *, is_counted: bool) -> LogExtent:
    """Return the size of a log; counting lines is slow, as it scans an index."""
    where = f"FROM logs WHERE {log.condition}"
    ends = [
        connection.execute(f"SELECT {end}(id) {where}", (log.value,)).fetchone()[0] for end in ("MIN", "MAX")
    ]
    counted = connection.execute(f"SELECT COUNT(*) {where}", (log.value,)).fetchone() if is_counted else None
    return LogExtent(ends[0], ends[1], None if counted is None else int(counted[0]))


def some_ranks(connection: sqlite3.Connection, log: LogKey) -> list[int]:
    """Return the ranks in a sample of first and last lines; -1: lines without a rank."""
    part = f"SELECT rank FROM logs WHERE {log.condition} ORDER BY id {{}} LIMIT {_SAMPLE}"  # noqa: S608 - constants
    rows = connection.execute(
        f"SELECT DISTINCT COALESCE(rank, -1) AS rank FROM (SELECT * FROM ({part.format('ASC')}) "  # noqa: S608 - constants
        f"UNION ALL SELECT * FROM ({part.format('DESC')})) ORDER BY 1",
        (log.value, log.value),
    )
    return [int(row["rank"]) for row in rows]


def whole_line(connection: sqlite3.Connection, log: LogKey, line_id: int) -> bytes | None:
    """Return an untruncated line as UTF-8; None if the log has no such line."""
    # In one query: reading a long text in parts would take quadratic time.
    row = connection.execute(
        f"SELECT CAST(log AS BLOB) AS log FROM logs WHERE {log.condition} AND id = ?",  # noqa: S608 - constants
        (log.value, line_id),
    ).fetchone()
    return None if row is None else bytes(row["log"])


def printed(
    connection: sqlite3.Connection, log: LogKey, after: int, up_to: int, limit: int
) -> list[StoredLine]:
    """Return at most ``limit`` untruncated lines in (``after``, ``up_to``], in order."""
    return fetch_all(
        StoredLine,
        connection,
        "SELECT logs.*, (SELECT resources_id FROM allocations a WHERE a.id = logs.allocation_id) AS container_id FROM logs "  # noqa: S608 - constants
        f"WHERE {log.condition} AND id > ? AND id <= ? ORDER BY id LIMIT ?",
        (log.value, after, up_to, limit),
    )
