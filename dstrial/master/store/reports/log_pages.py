"""Pages of a log: some lines before or behind a place, long lines cut."""

from __future__ import annotations

import dataclasses
import sqlite3
from collections.abc import Sequence

from dstrial.master.store.database import fetch_all
from dstrial.master.store.reports.logs import LEVELS, StoredLine

MAX_LINES = 1000  # Most lines of a page
MAX_BYTES = 2000  # Most bytes of a line in a page; more are got one line at a time
MAX_SEARCHED = 200_000  # How many lines one request looks through; the answer says how far that was
_SAMPLE = 5000


@dataclasses.dataclass(frozen=True, slots=True)
class LogOf:
    """A trial's log, which all of its tasks share, or that of a task without a trial."""

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
    """Which lines are wanted."""

    before: int | None = None  # only lines before this id, the nearest; None with ``after``
    after: int | None = None  # only lines behind this id; None for the newest lines
    limit: int = 200
    level: str | None = None  # this level and worse; lines without one count as INFO
    ranks: tuple[int, ...] = ()  # -1 for lines of no rank
    text: str = ""  # case-insensitive


@dataclasses.dataclass(frozen=True, slots=True)
class ShownLine:
    """A line, or its beginning."""

    id: int
    time_us: int
    level: str | None
    rank: int | None
    source: str
    stdtype: str | None
    text: str
    num_bytes: int  # of the whole line, without its line end

    @property
    def is_cut(self) -> bool:
        return self.num_bytes > MAX_BYTES


@dataclasses.dataclass(frozen=True, slots=True)
class LogPage:
    """Lines by id."""

    lines: list[ShownLine]  # the oldest first
    searched_to: int | None  # id at which a limit ended the search; None where nothing more is there
    last: int  # id of the newest line of the log; 0 for an empty one


@dataclasses.dataclass(frozen=True, slots=True)
class LogExtent:
    """How long a log is."""

    first: int | None  # id; None if it is empty
    last: int | None
    num_lines: int | None  # None if not counted


def page(connection: sqlite3.Connection, log: LogOf, wanted: PageFilter) -> LogPage:
    """Return the lines of a page, after a search of a bounded number of lines."""
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
    # Of an index alone, before any text is read: where the search ends.
    edge = _id_at(connection, where, values, order, MAX_SEARCHED - 1) if given else None
    if edge is not None:
        where += " AND id >= ?" if is_back else " AND id <= ?"
        values.append(edge)
    # As bytes: SQLite's functions of texts end at a zero character.
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
        # LIKE knows upper and lower case of ASCII only, as does lower().
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


def extent(connection: sqlite3.Connection, log: LogOf, *, is_counted: bool) -> LogExtent:
    """Return how long a log is; counting is slow, as it reads every line's place."""
    where = f"FROM logs WHERE {log.condition}"
    ends = [
        connection.execute(f"SELECT {end}(id) {where}", (log.value,)).fetchone()[0] for end in ("MIN", "MAX")
    ]
    counted = connection.execute(f"SELECT COUNT(*) {where}", (log.value,)).fetchone() if is_counted else None
    return LogExtent(ends[0], ends[1], None if counted is None else int(counted[0]))


def some_ranks(connection: sqlite3.Connection, log: LogOf) -> list[int]:
    """Return ranks of the first and last lines; -1 for lines of no rank."""
    part = f"SELECT rank FROM logs WHERE {log.condition} ORDER BY id {{}} LIMIT {_SAMPLE}"  # noqa: S608 - constants
    rows = connection.execute(
        f"SELECT DISTINCT COALESCE(rank, -1) AS rank FROM (SELECT * FROM ({part.format('ASC')}) "  # noqa: S608 - constants
        f"UNION ALL SELECT * FROM ({part.format('DESC')})) ORDER BY 1",
        (log.value, log.value),
    )
    return [int(row["rank"]) for row in rows]


def whole_line(connection: sqlite3.Connection, log: LogOf, line_id: int) -> bytes | None:
    """Return a line as it was printed, UTF-8; None if it is not of this log."""
    # In one piece: each part of a long text would read all that is before it again.
    row = connection.execute(
        f"SELECT CAST(log AS BLOB) AS log FROM logs WHERE {log.condition} AND id = ?",  # noqa: S608 - constants
        (log.value, line_id),
    ).fetchone()
    return None if row is None else bytes(row["log"])


def printed(
    connection: sqlite3.Connection, log: LogOf, after: int, up_to: int, limit: int
) -> list[StoredLine]:
    """Return whole lines behind an id and up to another, in order, at most ``limit``."""
    return fetch_all(
        StoredLine,
        connection,
        "SELECT logs.*, (SELECT resources_id FROM allocations a WHERE a.id = logs.allocation_id) AS container_id FROM logs "  # noqa: S608 - constants
        f"WHERE {log.condition} AND id > ? AND id <= ? ORDER BY id LIMIT ?",
        (log.value, after, up_to, limit),
    )
