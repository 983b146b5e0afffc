"""Backup and restore of the master's database."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

from dstrial.errors import DatabaseDamagedError, MasterError
from dstrial.file_writes import sync_path
from dstrial.master import hints
from dstrial.master.store import sqlite_file

NUM_DAILY = 7  # daily backups to keep
DAY_S = 24 * 3600.0


@dataclasses.dataclass(frozen=True, slots=True)
class Restored:
    kept: Path | None  # directory with the replaced database; None if no database existed
    num_experiments: int
    last_experiment: int


def last_experiment(path: Path) -> int | None:
    """Return a database's highest experiment id (0: none); None if it is unreadable."""
    with contextlib.suppress(sqlite3.DatabaseError), sqlite_file.reading(path) as connection:
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
            with sqlite_file.reading(database) as source, _copied(source, temporary) as made:
                problem = sqlite_file.check_whole(made)
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
    """Make a backup, or return None if the last daily backup is younger than a day.

    Keeps the ``NUM_DAILY`` newest daily backups. ``now_s`` is the epoch time.
    """
    daily = [copy for copy in sqlite_file.list_copies(database) if copy.is_daily]
    # abs(): if the clock was set back, a backup's time may be in the future.
    if any(abs(now_s - copy.time_s) < DAY_S for copy in daily):
        return None
    target = sqlite_file.new_path(database, now_s, "daily")
    make_copy(database, target)
    for old in [copy for copy in sqlite_file.list_copies(database) if copy.is_daily][NUM_DAILY:]:
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
    """Copy a backup to ``new``; return its number of experiments and the highest id."""
    new.unlink(missing_ok=True)
    with sqlite_file.reading(copy) as source, _copied(source, new) as made:
        problem = sqlite_file.check_whole(made)
        if problem:
            raise sqlite3.DatabaseError(problem)
        version = int(made.execute("PRAGMA user_version").fetchone()[0])
        if version != sqlite_file.SCHEMA_VERSION:
            raise MasterError(
                f"{copy} is of schema version {version}; expected {sqlite_file.SCHEMA_VERSION}. Take a copy of dstrial's "
                "database, with the release of dstrial that wrote it."
            )
        count, last = made.execute("SELECT COUNT(*), COALESCE(MAX(id), 0) FROM experiments").fetchone()
        return int(count), int(last)


def _move_aside(database: Path) -> Path | None:
    """Move a database and its WAL to a new directory; return None if no file exists."""
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
