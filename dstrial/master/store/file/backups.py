"""Copies the database while a master uses it: one checked file, or none."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

from dstrial.errors import DatabaseDamagedError, MasterError
from dstrial.file_writes import sync_path
from dstrial.master import mending
from dstrial.master.store.file import copies, integrity

_PAGES_PER_STEP = 2048


def make_copy(
    database: Path, target: Path, on_progress: Callable[[float], None] = lambda _fraction: None
) -> copies.Description:
    """Copy a database as it is at this moment, and check the copy.

    The writer goes on meanwhile: all steps read one snapshot, which the log keeps.

    Args:
        database: the file that a master may be using.
        target: a file that does not exist yet; its directory is made.
        on_progress: told what part is copied, from 0 to 1.

    Raises:
        DatabaseDamagedError: the copy does not pass SQLite's check, so the database does not either.
        MasterError: there is no database, or the target exists or cannot be written.
    """
    if not database.is_file() or not database.stat().st_size:
        raise MasterError(
            f"{database} is missing or empty; expected a database. {mending.START}, or name its directory "
            "with --state-dir."
        )
    if target.exists() or copies.description_path(target).exists():
        raise MasterError(f"{target} exists; expected a new file. Name another one, or remove it.")
    temporary = target.with_name(f".{target.name}.{os.getpid()}.new")
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600))
        try:
            description = _copy(database, temporary, on_progress)
            copies.write_description(target, description)
            os.link(
                temporary, target
            )  # Unlike a rename, it never replaces what somebody has put there meanwhile.
            sync_path(target.parent)
        finally:
            temporary.unlink(missing_ok=True)
    except sqlite3.DatabaseError as error:
        raise DatabaseDamagedError(
            f"{database} cannot be copied ({error}); expected a whole database and room for another. "
            f"{mending.SEE_LOG}, or make room."
        ) from error
    except OSError as error:
        raise MasterError(
            f"{target} cannot be written ({error.strerror}); expected a place with room. Name another one."
        ) from error
    return description


def _copy(database: Path, temporary: Path, on_progress: Callable[[float], None]) -> copies.Description:
    with integrity.reading(database) as source, contextlib.closing(_open(temporary)) as made:
        # A read transaction of our own: without it the copy would begin again whenever the master writes.
        source.execute("BEGIN")
        source.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
        source.backup(
            made,
            pages=_PAGES_PER_STEP,
            progress=lambda _status, left, total: on_progress(1 - left / total if total else 1.0),
            sleep=0.0,
        )
        source.execute("ROLLBACK")
        made.execute("PRAGMA journal_mode = DELETE")  # One file, which may be carried anywhere.
        problem = integrity.check_whole(made)
        if problem:
            raise sqlite3.DatabaseError(problem)
        cluster_id, highest = integrity.cluster_id_of(made), integrity.highest_ids(made)
    sync_path(temporary)
    return copies.Description(copies.digest(temporary), cluster_id, highest, time.time())


def _open(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA synchronous = OFF")  # It is synced once, when it is whole.
    return connection


def make_daily_copy(database: Path, now_s: float) -> Path | None:
    """Make a daily copy if it is due, and delete those beyond the newest.

    Returns None where the last one is new enough.

    Raises:
        MasterError: as for :func:`make_copy`; nothing is deleted then.
    """
    if not copies.is_due(copies.list_copies(database), now_s):
        return None
    target = copies.new_path(database, now_s, "daily")
    make_copy(database, target)
    for old in copies.superfluous(copies.list_copies(database)):
        copies.remove(old)
    return target
