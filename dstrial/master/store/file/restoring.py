"""Puts a copy of the database back, or takes the one that is there as it is.

No master has it open meanwhile. What is replaced is kept beside it, and ids that were given are not given again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import shutil
import sqlite3
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from dstrial.errors import DatabaseDamagedError, MasterError
from dstrial.file_writes import sync_path
from dstrial.master import mending
from dstrial.master.store.file import copies, integrity, marks
from dstrial.master.store.file.opening import SCHEMA_VERSION, make_table


@dataclasses.dataclass(frozen=True, slots=True)
class Restored:
    """What was done.

    Attributes:
        kept: where what was replaced lies; None if there was nothing.
        cluster_id: whose database it is now; empty for one without a first start.
        num_experiments: experiments in it.
        last_experiment: highest id of an experiment in it.
        next_experiment: the id that the next one gets.
        is_proved: whether the copy had a checksum, and it is right.
    """

    kept: Path | None
    cluster_id: str
    num_experiments: int
    last_experiment: int
    next_experiment: int
    is_proved: bool


def bring_back(database: Path, copy: Path) -> Restored:
    """Put a copy in the place of a database that nobody has open.

    Args:
        database: the place; what is there is kept.
        copy: as `dstrial backup` or the master made it, or any whole database of dstrial's.

    Raises:
        DatabaseDamagedError: the copy is damaged, or another cluster's; nothing is changed.
        MasterError: it is of a newer release, is missing, or there is no room.
    """
    is_proved = _check_copy(copy)
    before = _before(database)
    new = database.with_name(f"{database.name}.new")
    try:
        new.unlink(missing_ok=True)
        with integrity.reading(copy) as source, _writing(new) as made:
            _refuse_foreign(source, copy, before, database)
            source.backup(made)
            _prepare_copy(made, before)
        sync_path(new)
        kept = _keep(database, is_moved=True)
        new.replace(database)
        sync_path(database.parent)
    except OSError as error:
        raise MasterError(
            f"{database} cannot be written ({error.strerror}); expected room for another copy. Make room."
        ) from error
    except sqlite3.DatabaseError as error:
        raise _unusable_copy(copy, error) from error
    finally:
        new.unlink(missing_ok=True)
    return _settle(database, kept, is_proved=is_proved)


def take_as_is(database: Path) -> Restored:
    """Accept the database that is there, whatever lies beside it says.

    Nobody has it open.

    Raises:
        DatabaseDamagedError: it does not pass SQLite's check.
        MasterError: there is no room to keep a copy of it first.
    """
    before = _before(database)
    try:
        if database.exists() and database.stat().st_size:
            with integrity.reading(database) as connection:
                problem = integrity.check_whole(connection)
            if problem:
                raise DatabaseDamagedError(
                    f"{database} is damaged ({problem}); expected a database that passes SQLite's check. Put a copy back with "
                    f"{mending.put_back(None, database.parent)}."
                )
        kept = _keep(database, is_moved=False)
        make_table(database)
        with _writing(database) as connection:
            _carry_on(connection, before)
    except OSError as error:
        raise MasterError(
            f"{database} cannot be written ({error.strerror}); expected room for a copy of it. Make room."
        ) from error
    except sqlite3.DatabaseError as error:
        raise _unusable_copy(database, error) from error
    return _settle(database, kept, is_proved=False)


def _check_copy(copy: Path) -> bool:
    """Return whether a copy has a checksum; refuse one that is damaged."""
    if not copy.is_file():
        raise MasterError(
            f"{copy} is missing; expected a copy of a database. Name another, {mending.SEE_COPIES}."
        )
    try:
        description = copies.read_description(copy)
    except ValueError as error:
        raise DatabaseDamagedError(
            f"{copies.description_path(copy)} is damaged ({error}); expected the description of {copy.name}. Take another "
            "copy, or remove this file to take the copy by SQLite's check alone."
        ) from error
    if description is not None and copies.digest(copy) != description.sha256:
        raise DatabaseDamagedError(
            f"{copy} is not what was written; expected the SHA-256 in {copies.description_path(copy).name}. Take another copy."
        )
    try:
        with integrity.reading(copy) as connection:
            version = int(connection.execute("PRAGMA user_version").fetchone()[0])
            problem = integrity.check_whole(connection)
    except sqlite3.DatabaseError as error:
        raise _unusable_copy(copy, error) from error
    if problem:
        raise _unusable_copy(copy, problem)
    if version != SCHEMA_VERSION:
        raise MasterError(
            f"{copy} is of schema version {version}; expected {SCHEMA_VERSION}. Take a copy of dstrial's database, with "
            "the release of dstrial that wrote it."
        )
    return description is not None


def _unusable_copy(copy: Path, problem: object) -> DatabaseDamagedError:
    return DatabaseDamagedError(
        f"{copy} cannot be used ({problem}); expected a whole database of dstrial's. Take another copy, {mending.SEE_COPIES}."
    )


def _before(database: Path) -> marks.Marks:
    """Return what is known of what is replaced, by its marks and by itself."""
    known = marks.Marks()
    with contextlib.suppress(ValueError, TypeError):
        known = marks.read(marks.path_of(database)) or known
    with contextlib.suppress(sqlite3.DatabaseError):
        if database.exists() and database.stat().st_size:
            with integrity.reading(database) as connection:
                cluster_id, highest = integrity.cluster_id_of(connection), integrity.highest_ids(connection)
            if cluster_id and known.cluster_id in ("", cluster_id):
                known = dataclasses.replace(
                    known, cluster_id=cluster_id, highest=_highest(known.highest, highest)
                )
    return known


def _highest(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {name: max(one.get(name, 0), other.get(name, 0)) for name in sorted({*one, *other})}


def _refuse_foreign(source: sqlite3.Connection, copy: Path, before: marks.Marks, database: Path) -> None:
    cluster_id = integrity.cluster_id_of(source)
    if before.cluster_id and cluster_id != before.cluster_id:
        raise DatabaseDamagedError(
            f"{copy} is of cluster {cluster_id or 'none'}; expected {before.cluster_id}, that of {database.parent}. Name an "
            "empty directory with --state-dir to bring it back there."
        )


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[sqlite3.Connection]:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        yield connection


def _prepare_copy(made: sqlite3.Connection, before: marks.Marks) -> None:
    made.execute("PRAGMA journal_mode = DELETE")
    _carry_on(made, before)
    problem = integrity.check_whole(made)
    if problem:
        raise sqlite3.DatabaseError(problem)


def _carry_on(connection: sqlite3.Connection, before: marks.Marks) -> None:
    """Have ids that were given not given again.

    Of another cluster's there is nothing to know.
    """
    cluster_id = integrity.cluster_id_of(connection)
    if not before.cluster_id or cluster_id not in ("", before.cluster_id):
        return
    connection.execute("BEGIN IMMEDIATE")
    connection.execute(
        "INSERT OR IGNORE INTO cluster (key, value) VALUES ('cluster_id', ?)", (before.cluster_id,)
    )
    tables = {
        str(row[0]) for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
    }
    had = integrity.highest_ids(connection)
    for name, number in before.highest.items():
        if name in had:
            connection.execute("UPDATE sqlite_sequence SET seq = MAX(seq, ?) WHERE name = ?", (number, name))
        elif name in tables:
            connection.execute("INSERT INTO sqlite_sequence (name, seq) VALUES (?, ?)", (name, number))
    connection.execute("COMMIT")


def _keep(database: Path, *, is_moved: bool) -> Path | None:
    """Put what is there into a directory of its own.

    The marks stay, by which an interruption is found.
    """
    found = [database, *(database.with_name(f"{database.name}{end}") for end in ("-wal", "-pages", "-marks"))]
    found = [path for path in found if path.exists()]
    if not found:
        return None
    moment = datetime.datetime.fromtimestamp(time.time(), datetime.timezone.utc)
    directory = database.with_name(f"replaced-{moment:%Y%m%d-%H%M%S-%f}")
    directory.mkdir(mode=0o700)
    for path in found:
        if is_moved and path.name != marks.path_of(database).name:
            os.link(path, directory / path.name)
        else:
            shutil.copy2(path, directory / path.name)
            sync_path(directory / path.name)
    sync_path(directory)
    if is_moved:
        for end in ("-wal", "-shm", "-pages"):
            database.with_name(f"{database.name}{end}").unlink(missing_ok=True)
    return directory


def _settle(database: Path, kept: Path | None, *, is_proved: bool) -> Restored:
    """Make what lies beside the database say the same as it."""
    make_table(database)
    with integrity.reading(database) as connection:
        cluster_id, highest = integrity.cluster_id_of(connection), integrity.highest_ids(connection)
        count, last = connection.execute("SELECT COUNT(*), COALESCE(MAX(id), 0) FROM experiments").fetchone()
    marks.write(marks.path_of(database), marks.Marks(cluster_id, highest, boot_id=marks.boot_id()))
    return Restored(kept, cluster_id, int(count), int(last), highest.get("experiments", 0) + 1, is_proved)
