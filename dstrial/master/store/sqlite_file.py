"""Opens and verifies the SQLite file; lists its backups.

The master creates ``<state dir>/backups/daily-DATE-TIME.db``. Users create ``master-DATE-TIME.db`` in the same directory, which
the master never deletes. Times are UTC.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import re
import sqlite3
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from urllib.parse import quote

from dstrial.errors import DatabaseDamagedError, MasterError
from dstrial.master import hints

SCHEMA_VERSION = 16
_BUSY_TIMEOUT_S = 30.0
_CORRUPT, _NOT_A_DATABASE = 11, 26  # SQLITE_CORRUPT (damaged page), SQLITE_NOTADB (damaged first page)
_NAME = re.compile(r"(daily|master)-(\d{8}-\d{6})\.db")
_TIME = "%Y%m%d-%H%M%S"


@dataclasses.dataclass(frozen=True, slots=True)
class Copy:
    """A backup of the master's database."""

    path: Path
    is_daily: bool
    time_s: float  # epoch time, from the file name


def directory_of(database: Path) -> Path:
    """Return the backup directory of a database."""
    return database.parent / "backups"


def new_path(database: Path, now_s: float, kind: str) -> Path:
    """Return the path for a new backup; ``kind`` is "daily" or "master" (by a user)."""
    moment = datetime.datetime.fromtimestamp(now_s, datetime.timezone.utc)
    return directory_of(database) / f"{kind}-{moment.strftime(_TIME)}.db"


def list_copies(database: Path) -> list[Copy]:
    """Return the backups of a database, newest first."""
    try:
        paths = list(directory_of(database).iterdir())
    except OSError:
        return []
    found = []
    for path in paths:
        match = _NAME.fullmatch(path.name)
        if match is not None:
            moment = datetime.datetime.strptime(match[2], _TIME).replace(tzinfo=datetime.timezone.utc)
            found.append(Copy(path, match[1] == "daily", moment.timestamp()))
    return sorted(found, key=lambda copy: (copy.time_s, copy.path.name), reverse=True)


def newest_copy(database: Path) -> Path | None:
    """Return the path of the newest backup; None if there is none."""
    found = list_copies(database)
    return found[0].path if found else None


def unusable(path: Path, error: Exception) -> MasterError:
    """Return the ``MasterError`` for a database file that SQLite cannot open."""
    return MasterError(
        f"{path} cannot be used ({error}); expected a database of dstrial's with room to grow. Make room, put a copy of it "
        f"back with {hints.put_back(newest_copy(path), path.parent)}, or pass another --state-dir."
    )


def is_damage(error: BaseException) -> bool:
    """Return whether an error of SQLite means that a page of the file is damaged."""
    if not isinstance(error, sqlite3.DatabaseError):
        return False
    code = getattr(error, "sqlite_errorcode", None)
    if code is None:  # Python 3.10 has no error codes.
        return "malformed" in str(error) or "not a database" in str(error)
    return code & 0xFF in (_CORRUPT, _NOT_A_DATABASE)


def open_for_writer(path: Path) -> sqlite3.Connection:
    """Verify a database and open it for writing; create the schema in a new one.

    Raises:
        DatabaseDamagedError: the file is damaged, or missing although its WAL or a backup exists; nothing is changed.
        MasterError: the file has another schema version.
        sqlite3.Error: SQLite cannot open the file.
    """
    problem = _find_damage(path)
    if problem:
        put_back = hints.put_back(newest_copy(path), path.parent)
        raise DatabaseDamagedError(f"{path} is {problem}. Put a copy back with {put_back}.")
    connection = connect(path)
    try:
        _prepare(connection, path)
    except BaseException:
        connection.close()
        raise
    return connection


def _find_damage(path: Path) -> str:
    """Check a closed database; return a description of the damage, or an empty string."""
    size = path.stat().st_size if path.exists() else None
    if not size:
        log, new = (path.with_name(f"{path.name}{end}") for end in ("-wal", ".new"))
        # SQLite treats an empty file as a new database and deletes its WAL.
        if list_copies(path) or new.exists() or (log.exists() and log.stat().st_size):
            what = "missing" if size is None else "empty"
            return f"{what}; expected the database whose log or copies lie beside it"
        return ""
    with reading(path) as connection:
        problem = check_whole(connection)
    return f"damaged ({problem}); expected a database that passes SQLite's check" if problem else ""


def check_whole(connection: sqlite3.Connection) -> str:
    """Run SQLite's ``quick_check``; return the problems found, or an empty string."""
    try:
        connection.execute("PRAGMA cell_size_check = 1")
        found = [str(row[0]) for row in connection.execute("PRAGMA quick_check(5)")]
    except sqlite3.DatabaseError as error:
        if not is_damage(error):
            raise  # for example disk full
        return str(error)
    return "" if found == ["ok"] else "; ".join(" ".join(line.split()) for line in found)


@contextlib.contextmanager
def reading(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a database read-only, so that closing it does not checkpoint the WAL."""
    connection = sqlite3.connect(
        f"file:{quote(str(path))}?mode=ro", uri=True, timeout=_BUSY_TIMEOUT_S, isolation_level=None
    )
    with contextlib.closing(connection):
        connection.row_factory = sqlite3.Row
        yield connection


def connect(path: Path) -> sqlite3.Connection:
    """Connect to a database and set its pragmas; the schema may not exist yet."""
    connection = sqlite3.connect(
        path, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False, cached_statements=512
    )
    connection.row_factory = sqlite3.Row
    connection.execute("PRAGMA journal_mode = WAL")
    # Commits must be durable before they are acknowledged. FULL takes 0.5 ms per group commit on ext4 over NVMe, NORMAL 0.15.
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA cell_size_check = 1")
    # Keep transactions larger than the cache in memory. Once pages have spilled to the WAL and a savepoint is rolled back, SQLite
    # (3.40.1) writes later commits without checksums, and they are lost if the process is killed before the next checkpoint.
    connection.execute("PRAGMA cache_spill = 0")
    connection.execute("PRAGMA foreign_keys = 1")
    connection.execute("PRAGMA cache_size = -16384")
    connection.execute("PRAGMA temp_store = MEMORY")
    return connection


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version == SCHEMA_VERSION:
        return
    if version:
        raise MasterError(
            f"{path} is of schema version {version}; expected {SCHEMA_VERSION}. "
            "Start the release of dstrial that wrote it, or pass another --state-dir."
        )
    sql = resources.files("dstrial.master.store").joinpath("schema.sql").read_text(encoding="utf-8")
    connection.executescript(f"BEGIN; {sql} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")
