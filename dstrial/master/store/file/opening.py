"""Opens the SQLite file, with this release's schema and settings.

What is wrong with it is refused before anything is written to it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sqlite3
from importlib import resources
from pathlib import Path

from dstrial.errors import MasterError
from dstrial.master import mending
from dstrial.master.store.file import copies, integrity, marks, page_checksums
from dstrial.master.store.file.log_keeper import LogKeeper

SCHEMA_VERSION = 9
_BUSY_TIMEOUT_S = 30.0
_CORRUPT, _NOT_A_DATABASE = 11, 26
"""SQLite's codes of a damaged page, and of a damaged first one."""


def unusable(path: Path, error: Exception) -> MasterError:
    """Return what to raise for a file that SQLite cannot use."""
    return MasterError(
        f"{path} cannot be used ({error}); expected a database of dstrial's with room to grow. Make room, put a copy of it "
        f"back with {mending.put_back(copies.newest_copy(path), path.parent)}, or pass another --state-dir."
    )


def is_damage(error: BaseException) -> bool:
    """Whether SQLite has met a damaged page.

    By its words before Python 3.11, which has no codes.
    """
    if not isinstance(error, sqlite3.DatabaseError):
        return False
    code = getattr(error, "sqlite_errorcode", None)
    if code is None:
        return "malformed" in str(error) or "not a database" in str(error)
    return code & 0xFF in (_CORRUPT, _NOT_A_DATABASE)


def open_for_writer(path: Path) -> tuple[tuple[str, ...], sqlite3.Connection, LogKeeper]:
    """Look at a database and open it for the writer; make the schema in a new one.

    Returns:
        What was found and is not lost by it, the connection, and the keeper of its log.

    Raises:
        DatabaseDamagedError: it is not the one that the last master left.
        MasterError: it has another schema.
        sqlite3.Error: SQLite cannot use it.
        OSError: it, or what lies beside it, cannot be written.
    """
    facts = integrity.inspect(path)
    verdict = integrity.judge(path, facts)
    if verdict.refusal:
        raise integrity.refuse(path, verdict.refusal, facts.copy)
    log = facts.log
    last = marks.Marks(
        cluster_id=facts.cluster_id,
        highest=facts.highest,
        is_open=True,
        boot_id=facts.boot_id,
        salt="" if log is None else log.salt,
        num_frames=0 if log is None else log.num_committed,
    )
    marks.write(marks.path_of(path), last)
    if not facts.has_table or facts.wrong_pages:
        make_table(path)
        last = dataclasses.replace(last, salt="", num_frames=0)
        marks.write(marks.path_of(path), last)
    connection = connect(path)
    keeper = None
    try:
        prepare(connection, path)
        keeper = LogKeeper(path, connection, last)
        keeper.fold()
    except BaseException:
        connection.close()
        if keeper is not None:
            keeper.close()
        raise
    return verdict.notes, connection, keeper


def make_table(path: Path) -> None:
    """Make the schema and the checksums of a database that nobody has open."""
    with contextlib.closing(connect(path)) as connection:
        prepare(connection, path)
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    # After it is closed: a process that closes a file gives up its locks on it.
    table = page_checksums.of_file(path)
    assert table is not None, "a database with a schema has pages"
    page_checksums.write(page_checksums.path_of(path), table)


def connect(path: Path) -> sqlite3.Connection:
    """Connect to a database of this release's schema, or to one that is to have it."""
    connection = sqlite3.connect(
        path, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False, cached_statements=512
    )
    connection.row_factory = sqlite3.Row
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute("PRAGMA wal_autocheckpoint = 0")  # It is LogKeeper's to fold.
    connection.execute("PRAGMA cell_size_check = 1")
    # A transaction that outgrows the cache stays in memory. Once its pages have gone to the log and a savepoint is rolled back,
    # SQLite (3.40.1) writes later commits without checksums: they are lost if the process is killed before the next fold.
    connection.execute("PRAGMA cache_spill = 0")
    connection.execute("PRAGMA foreign_keys = 1")
    connection.execute("PRAGMA cache_size = -16384")
    connection.execute("PRAGMA temp_store = MEMORY")
    return connection


def prepare(connection: sqlite3.Connection, path: Path) -> None:
    """Make the schema in a new file; refuse a file with another schema."""
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
