"""Pages of a log: lines before or after a line id, with long lines truncated."""

from __future__ import annotations

import dataclasses
import sqlite3

from dstrial.master.store.database import Conditions, fetch_value
from dstrial.master.store.reports.logs import LEVELS, LogKey, need_levels_and_ranks

MAX_LINES = 1000  # per page
MAX_BYTES = 2000  # per line in a page
MAX_SEARCHED = 200_000  # lines scanned per request; see LogPage.searched_to


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
