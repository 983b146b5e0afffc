"""Whether a database is the one that its last master left.

Looked at before SQLite opens it for writing.

``inspect`` gathers what is there, ``judge`` decides, purely. What is wrong is refused with the line to type; what
loses nothing that was confirmed is only named. Nothing is ever repaired by guessing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

from dstrial.errors import DatabaseDamagedError
from dstrial.master import mending
from dstrial.master.store.file import marks, page_checksums, wal
from dstrial.master.store.file.copies import newest_copy

T = TypeVar("T")

_MAX_NAMED = 5


@dataclasses.dataclass(frozen=True, slots=True)
class Facts:
    """What is found of a database while no master has it.

    Attributes:
        num_bytes: size of the file; None if there is none.
        marks: as stored; None if there are none.
        marks_problem: why they cannot be read; empty if they can.
        boot_id: of this start of the machine.
        has_table: whether there are checksums of pages.
        table_problem: why they cannot be read; empty if they can.
        log_bytes: size of the log; 0 if there is none.
        log: the log as far as SQLite would take it; None for nothing.
        wrong_pages: pages that are neither what the last fold left nor in the log.
        wrong_tables: tables and indexes that have them, as far as SQLite can say.
        check: what SQLite's own check says against it; empty if nothing, or not asked for.
        cluster_id: as the database says; empty if it does not.
        highest: as the database says, see :class:`dstrial.master.store.file.marks.Marks`.
        copy: the newest copy beside it; None if there is none.
    """

    num_bytes: int | None
    marks: marks.Marks | None
    marks_problem: str
    boot_id: str
    has_table: bool
    table_problem: str
    log_bytes: int
    log: wal.Scan | None
    wrong_pages: Sequence[int] = ()
    wrong_tables: Sequence[str] = ()
    check: str = ""
    cluster_id: str = ""
    highest: Mapping[str, int] = dataclasses.field(default_factory=dict)
    copy: Path | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """What follows.

    Attributes:
        refusal: what is wrong, as ``<what> is <got>; expected <what>.``; empty to go on.
        notes: what is to be said of it otherwise.
    """

    refusal: str
    notes: tuple[str, ...]


def judge(path: Path, facts: Facts) -> Verdict:
    """Decide whether a database may be used."""
    notes: list[str] = []
    found = facts.marks
    if not facts.num_bytes:
        return Verdict(_of_nothing(path, facts), ())
    if facts.check:
        return Verdict(
            f"{path} is damaged ({facts.check}); expected a database that passes SQLite's check.", ()
        )
    if facts.marks_problem:
        notes.append(
            f"{marks.path_of(path)} is damaged ({facts.marks_problem}); it is made anew from the database, which is whole"
        )
    if facts.table_problem:
        notes.append(
            f"{page_checksums.path_of(path)} is damaged ({facts.table_problem}); it is made anew from the database, "
            "which passes SQLite's check"
        )
    elif found is not None and not facts.has_table:
        notes.append(
            f"{page_checksums.path_of(path)} is missing; it is made anew from the database, which passes SQLite's check"
        )
    elif found is None and facts.has_table and not facts.marks_problem:
        notes.append(f"{marks.path_of(path)} is missing; it is made anew from the database, which is whole")
    if found is not None:
        refusal = _of_log(path, facts, found, notes) or _of_identity(path, facts, found)
        if refusal:
            return Verdict(refusal, tuple(notes))
    if facts.wrong_pages and not _is_folded_by_another(facts):
        return Verdict(_of_pages(path, facts), tuple(notes))
    if facts.wrong_pages:
        notes.append(
            f"{path} was written by another program after its master had ended, which folded its log in; it passes "
            "SQLite's check and is taken"
        )
    return Verdict("", tuple(notes))


def _of_nothing(path: Path, facts: Facts) -> str:
    """Say what is wrong with a file that is missing or empty.

    Nothing is where there never was any other.
    """
    what = "missing" if facts.num_bytes is None else "empty"
    if facts.marks is not None and (facts.marks.cluster_id or facts.marks.highest):
        return f"{path} is {what}; expected the database of cluster {facts.marks.cluster_id} with {_counts(facts.marks.highest)}."
    if (
        facts.marks_problem
        or facts.has_table
        or facts.table_problem
        or facts.copy is not None
        or facts.log_bytes
    ):
        return f"{path} is {what}; expected the database whose log, checksums or copies lie beside it."
    return ""


def _of_identity(path: Path, facts: Facts, found: marks.Marks) -> str:
    if found.cluster_id and facts.cluster_id != found.cluster_id:
        return f"{path} is of cluster {facts.cluster_id or 'none'}; expected {found.cluster_id}."
    older = {name: number for name, number in found.highest.items() if facts.highest.get(name, 0) < number}
    if older:
        had = {name: facts.highest.get(name, 0) for name in older}
        return f"{path} is older than the one the last master had: it ends at {_counts(had)}; expected {_counts(older)}."
    return ""


def _of_log(path: Path, facts: Facts, found: marks.Marks, notes: list[str]) -> str:
    log = f"{path}-wal"
    num_committed = 0 if facts.log is None else facts.log.num_committed
    is_same_log = facts.log is not None and facts.log.salt == found.salt
    if not found.num_frames:
        if num_committed and not _may_follow(facts.log, found):
            return f"{log} is of another time than {path.name}, which has taken in all of its own; expected none."
        return ""
    has_power_failed = found.boot_id != facts.boot_id
    num_needed = found.num_synced if has_power_failed else found.num_frames
    if is_same_log and num_committed >= num_needed:
        if num_committed < found.num_frames:
            notes.append(
                f"the machine ended before the last {found.num_frames - num_committed} of {found.num_frames} pages of {log} "
                "were on the disk: reports and lines of logs of its last moments are gone; experiments, checkpoints "
                "and registrations are not"
            )
        return ""
    if not num_needed or _is_folded_by_another(facts):
        return ""
    if not facts.log_bytes:
        return f"{log} is missing or empty; expected {num_needed} pages that {path.name} does not have."
    if is_same_log:
        return f"{log} is damaged or cut after page {num_committed}; expected {num_needed} pages."
    return f"{log} is damaged, or of another time; expected the {num_needed} pages that the last master wrote to it."


def _may_follow(log: wal.Scan | None, found: marks.Marks) -> bool:
    """Whether a log may stand beside a database that has taken in all that was noted.

    A master may be killed before it has noted its first commit to a new log; nobody was told of that commit. SQLite counts
    the first half of the salt up whenever it begins a log anew.
    """
    if log is None or not found.is_open:
        return log is None
    if not found.salt:
        return True
    if log.salt == found.salt:
        return log.num_committed >= found.num_folded
    return (int(log.salt[:8], 16) - int(found.salt[:8], 16)) % 2**32 == 1


def _of_pages(path: Path, facts: Facts) -> str:
    shown = ", ".join(str(page) for page in facts.wrong_pages[:_MAX_NAMED])
    more = len(facts.wrong_pages) - _MAX_NAMED
    tables = f" ({', '.join(facts.wrong_tables)})" if facts.wrong_tables else ""
    return (
        f"{path} is not what its master wrote: page{'s' * (len(facts.wrong_pages) > 1)} {shown}"
        f"{f' and {more} more' if more > 0 else ''}{tables} {'differ' if len(facts.wrong_pages) > 1 else 'differs'}; expected "
        f"the checksums of {page_checksums.path_of(path).name}."
    )


def _is_folded_by_another(facts: Facts) -> bool:
    """Whether another program has opened the database after a kill.

    SQLite then moves the log into it and removes it.
    """
    return (
        facts.marks is not None
        and facts.marks.is_open
        and facts.marks.num_frames > 0
        and not facts.log_bytes
        and bool(facts.wrong_pages)
    )


def _counts(highest: Mapping[str, int]) -> str:
    named = [name for name in ("experiments", "trials", "models", "commands") if name in highest]
    names = named or sorted(highest)
    return ", ".join(f"{name} up to {highest[name]}" for name in names) or "nothing"


def refuse(path: Path, refusal: str, copy: Path | None) -> DatabaseDamagedError:
    """Return what to raise, with the line to type."""
    which = "the newest copy" if copy is not None else "a copy of it"
    return DatabaseDamagedError(
        f"{refusal} Put {which} back with {mending.put_back(copy, path.parent)}, or take what is there with "
        f"{mending.take_as_is(path.parent)}."
    )


def inspect(path: Path) -> Facts:
    """Look at a database that nobody has open, changing nothing.

    Raises:
        sqlite3.DatabaseError: SQLite cannot read it.
        OSError: it cannot be read.
    """
    stored, marks_problem = _read(lambda: marks.read(marks.path_of(path)))
    table, table_problem = _read(lambda: page_checksums.read(page_checksums.path_of(path)))
    log_path = path.with_name(f"{path.name}-wal")
    log_content = log_path.read_bytes() if log_path.exists() else b""
    log = wal.scan(log_content)
    facts = Facts(
        num_bytes=path.stat().st_size if path.exists() else None,
        marks=stored,
        marks_problem=marks_problem,
        boot_id=marks.boot_id(),
        has_table=table is not None,
        table_problem=table_problem,
        log_bytes=len(log_content),
        log=log,
        copy=newest_copy(path),
    )
    if not facts.num_bytes:
        return facts
    wrong = (
        page_checksums.differing(table, page_checksums.of_file(path), {} if log is None else log.pages)
        if table is not None
        else []
    )
    is_doubtful = bool(wrong) or table is None or stored is None
    with reading(path) as connection:
        connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()  # Is it a database at all?
        is_checked = is_doubtful or (stored is not None and stored.is_open)
        check = check_whole(connection, is_thorough=is_doubtful) if is_checked else ""
        return dataclasses.replace(
            facts,
            wrong_pages=wrong,
            wrong_tables=_tables_of(connection, wrong) if wrong and not check else (),
            check=check,
            cluster_id="" if check else cluster_id_of(connection),
            highest={} if check else highest_ids(connection),
        )


def _read(function: Callable[[], T | None]) -> tuple[T | None, str]:
    """Return what a side file says and, instead of it, why it cannot be read."""
    try:
        return function(), ""
    except (ValueError, TypeError) as error:
        return None, str(error)


@contextlib.contextmanager
def reading(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a database to look at it, which leaves its log as it is.

    A connection that could write would move the log into the database when it is the last one to be closed.
    """
    connection = sqlite3.connect(
        f"file:{quote(str(path))}?mode=ro", uri=True, timeout=30.0, isolation_level=None
    )
    with contextlib.closing(connection):
        connection.row_factory = sqlite3.Row
        yield connection


def highest_ids(connection: sqlite3.Connection) -> dict[str, int]:
    """Return table -> highest id, of tables whose ids are never given again."""
    rows = connection.execute("SELECT name FROM sqlite_master WHERE name = 'sqlite_sequence'").fetchall()
    if not rows:
        return {}
    return {str(row[0]): int(row[1]) for row in connection.execute("SELECT name, seq FROM sqlite_sequence")}


def check_whole(connection: sqlite3.Connection, *, is_thorough: bool = True) -> str:
    """Return what SQLite's own check says against a database; empty for nothing.

    Args:
        connection: to the database.
        is_thorough: whether indexes are compared with their tables, too, which takes several times as long.
    """
    try:
        connection.execute("PRAGMA cell_size_check = 1")
        name = "integrity_check" if is_thorough else "quick_check"
        found = [str(row[0]) for row in connection.execute(f"PRAGMA {name}({_MAX_NAMED})")]
    except sqlite3.DatabaseError as error:
        return str(error)
    return "" if found == ["ok"] else "; ".join(" ".join(line.split()) for line in found)


def cluster_id_of(connection: sqlite3.Connection) -> str:
    """Return whose database it is; empty if it does not say."""
    if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'cluster'").fetchone():
        return ""
    row = connection.execute("SELECT value FROM cluster WHERE key = 'cluster_id'").fetchone()
    return "" if row is None else str(row[0])


def _tables_of(connection: sqlite3.Connection, pages: Sequence[int]) -> list[str]:
    marks_ = ", ".join("?" * len(pages[:100]))
    try:
        rows = connection.execute(
            f"SELECT DISTINCT name FROM dbstat WHERE pageno IN ({marks_}) ORDER BY name",  # noqa: S608 - question marks
            list(pages[:100]),
        ).fetchall()
    except sqlite3.DatabaseError:  # SQLite may be built without it.
        return []
    return [str(row[0]) for row in rows]
