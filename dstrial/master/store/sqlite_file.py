"""Open and verify the SQLite file; back it up and restore it.

The master creates ``<state dir>/backups/daily-DATE-TIME.db``. ``dstrial backup`` creates ``master-DATE-TIME.db`` in the same
directory; the master never deletes these files. Times are UTC.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import re
import sqlite3
import time
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from urllib.parse import quote

from dstrial.errors import DatabaseDamagedError, MasterError
from dstrial.file_writes import sync_path
from dstrial.master import hints

SCHEMA_VERSION = 16
_BUSY_TIMEOUT_S = 30.0  # wait for a lock that another connection holds
_CORRUPT, _NOT_A_DATABASE = 11, 26  # SQLITE_CORRUPT (damaged page), SQLITE_NOTADB (damaged first page)
_NAME = re.compile(r"(daily|master)-(\d{8}-\d{6})\.db")
_TIME = "%Y%m%d-%H%M%S"
NUM_DAILY = 7  # daily backups to keep
DAY_S = 24 * 3600.0


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
    """Return the path for a new backup.

    ``kind`` is "daily", or "master" for a backup by ``dstrial backup``.
    """
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


@dataclasses.dataclass(frozen=True, slots=True)
class Restored:
    """Result of ``restore_copy``."""

    kept: Path | None  # directory with the replaced database; None if no database existed
    num_experiments: int
    last_experiment: int  # highest experiment id; 0 if there is none


def last_experiment(path: Path) -> int | None:
    """Return a database's highest experiment id (0: none); None if it is unreadable."""
    with contextlib.suppress(sqlite3.DatabaseError), reading(path) as connection:
        return int(connection.execute("SELECT COALESCE(MAX(id), 0) FROM experiments").fetchone()[0])
    return None


def make_copy(database: Path, target: Path) -> None:
    """Copy a database to the new file ``target`` and verify the copy.

    The database may be in use.

    Raises:
        DatabaseDamagedError: SQLite cannot copy the database, or the copy fails verification.
        MasterError: the database is missing, or the target exists or cannot be written.
    """
    if not database.is_file() or not database.stat().st_size:
        raise MasterError(
            f"{database} is missing or empty; expected a database. {hints.START}, or name its directory "
            "with --state-dir."
        )
    if target.exists():
        raise MasterError(f"{target} exists; expected a new file. Name another one, or remove it.")
    temporary = target.with_name(f".{target.name}.{os.getpid()}.new")
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600))
        try:
            with reading(database) as source, _copied(source, temporary) as made:
                problem = check_whole(made)
                if problem:
                    raise sqlite3.DatabaseError(problem)
            os.link(temporary, target)  # a link, unlike a rename, never replaces an existing file
            sync_path(target.parent)
        finally:
            temporary.unlink(missing_ok=True)
    except sqlite3.DatabaseError as error:
        raise DatabaseDamagedError(
            f"{database} cannot be copied ({error}); expected a whole database and room for another. "
            f"{hints.SEE_LOG}, or make room."
        ) from error
    except OSError as error:
        raise MasterError(
            f"{target} cannot be written ({error.strerror}); expected a place with room. Name another one."
        ) from error


@contextlib.contextmanager
def _copied(source: sqlite3.Connection, path: Path) -> Iterator[sqlite3.Connection]:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as made:
        source.backup(made)  # in one step, so that concurrent writes do not restart it
        made.execute("PRAGMA journal_mode = DELETE")  # a single file, without a WAL
        yield made


def make_daily_copy(database: Path, now_s: float) -> Path | None:
    """Make a daily backup and return its path; keep the ``NUM_DAILY`` newest of them.

    Returns None, without a backup, if the last daily backup is younger than a day. ``now_s`` is the epoch time.
    """
    daily = [copy for copy in list_copies(database) if copy.is_daily]
    # abs(): if the clock was set back, a backup's time may be in the future.
    if any(abs(now_s - copy.time_s) < DAY_S for copy in daily):
        return None
    target = new_path(database, now_s, "daily")
    make_copy(database, target)
    for old in [copy for copy in list_copies(database) if copy.is_daily][NUM_DAILY:]:
        old.path.unlink(missing_ok=True)
    return target


def restore_copy(database: Path, copy: Path) -> Restored:
    """Replace a database, which no process may use, by a backup.

    The replaced files are moved to a new directory, ``Restored.kept``.

    Raises:
        DatabaseDamagedError: the backup is damaged; nothing is changed.
        MasterError: the backup has another schema version, or the disk is full.
    """
    new = database.with_name(f"{database.name}.new")
    try:
        try:
            num_experiments, last = _copy_checked(copy, new)
        except BaseException:
            new.unlink(missing_ok=True)
            raise
        # A crash between here and replace() leaves no database; a master does not start while master.db.new exists.
        kept = _move_aside(database)
        new.replace(database)
        sync_path(database.parent)
    except OSError as error:
        raise MasterError(
            f"{database} cannot be written ({error.strerror}); expected room for another copy. Make room."
        ) from error
    except sqlite3.DatabaseError as error:
        raise DatabaseDamagedError(
            f"{copy} cannot be used ({error}); expected a whole database of dstrial's. Take another copy, "
            f"{hints.SEE_COPIES}."
        ) from error
    return Restored(kept, num_experiments, last)


def _copy_checked(copy: Path, new: Path) -> tuple[int, int]:
    """Copy and verify a backup; return (number of experiments, highest experiment id).

    ``new`` is the path of the copy, which is overwritten.
    """
    new.unlink(missing_ok=True)
    with reading(copy) as source, _copied(source, new) as made:
        problem = check_whole(made)
        if problem:
            raise sqlite3.DatabaseError(problem)
        version = int(made.execute("PRAGMA user_version").fetchone()[0])
        if version != SCHEMA_VERSION:
            raise MasterError(
                f"{copy} is of schema version {version}; expected {SCHEMA_VERSION}. Take a copy of dstrial's "
                "database, with the release of dstrial that wrote it."
            )
        count, last = made.execute("SELECT COUNT(*), COALESCE(MAX(id), 0) FROM experiments").fetchone()
        return int(count), int(last)


def _move_aside(database: Path) -> Path | None:
    """Move a database and its WAL to a new directory, and return the directory.

    Returns None if none of the files exists.
    """
    found = [
        path for end in ("", "-wal", "-shm") if (path := database.with_name(f"{database.name}{end}")).exists()
    ]
    if not found:
        return None
    moment = datetime.datetime.fromtimestamp(time.time(), datetime.timezone.utc)
    directory = database.with_name(f"replaced-{moment:%Y%m%d-%H%M%S-%f}")
    directory.mkdir(mode=0o700)
    for path in found:
        path.rename(directory / path.name)
    sync_path(directory)
    return directory
