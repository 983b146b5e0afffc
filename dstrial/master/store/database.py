"""The SQLite database: one writer thread with group commit, and many readers.

A write is a function of a :class:`Transaction`. Pending functions are committed as a group, each in its own savepoint: an
exception rolls back only its function. Listeners are notified of published topics after the commit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import queue
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from dstrial.errors import DatabaseDamagedError, MasterError
from dstrial.master import hints
from dstrial.master.store.sqlite_file import connect, is_damage, open_for_writer, unusable

T = TypeVar("T")
logger = logging.getLogger(__name__)

_MAX_GROUP = 512  # writes per commit
_MAX_GROUP_S = 0.05  # time in which a group collects further writes before its commit
_MAX_IDLE_READERS = 8  # open connections that later reads reuse
_RECENT_S = 30.0  # status reports a failed write for this long; rejected clients retry within this time

Connection: TypeAlias = sqlite3.Connection  # for the functions of the store only

# Names for modules outside the store, which do not import sqlite3.
SqlError = sqlite3.Error
OperationalError = sqlite3.OperationalError


_CONVERTERS: dict[Any, Callable[[Any], Any]] = {
    "bool": bool,
    "bool | None": bool,
    "tuple[int, ...]": lambda text: tuple(json.loads(text)),
    "tuple[str, ...]": lambda text: tuple(json.loads(text)),
    "dict[str, int]": json.loads,
}
"""Field annotation -> converter of the column's value; sequences and mappings are stored as JSON."""


@functools.cache
def _fields(kind: type[Any]) -> tuple[tuple[str, ...], tuple[tuple[int, Callable[[Any], Any]], ...]]:
    """Return (field names, converters) of a dataclass whose instances are table rows.

    Converters are (field index, function) of each field whose type SQLite lacks, for example bool.
    """
    fields = dataclasses.fields(kind)
    converters = [(i, _CONVERTERS[field.type]) for i, field in enumerate(fields) if field.type in _CONVERTERS]
    return tuple(field.name for field in fields), tuple(converters)


Parameters: TypeAlias = "Sequence[Any] | dict[str, Any]"


def fetch_each(kind: type[T], connection: Connection, sql: str, parameters: Parameters = ()) -> Iterator[T]:
    """Yield a query's rows as instances of ``kind``, which has one field per column."""
    cursor = connection.execute(sql, parameters)
    cursor.row_factory = None  # tuples take half the time of rows
    columns = [column[0] for column in cursor.description]
    names, converters = _fields(kind)  # type: ignore[arg-type]  # a class is hashable
    if sorted(columns) != sorted(names):
        raise TypeError(
            f"columns are {columns}; expected those of {kind.__name__}, {list(names)}. Read these."
        )
    # Match columns by name, as their order may differ from the order of the fields.
    places = [columns.index(name) for name in names]
    for row in cursor:
        values = [row[place] for place in places]
        for i, convert in converters:
            if values[i] is not None:
                values[i] = convert(values[i])
        yield kind(*values)


def fetch_all(kind: type[T], connection: Connection, sql: str, parameters: Parameters = ()) -> list[T]:
    return list(fetch_each(kind, connection, sql, parameters))


def fetch_one(kind: type[T], connection: Connection, sql: str, parameters: Parameters = ()) -> T | None:
    return next(fetch_each(kind, connection, sql, parameters), None)


def fetch_column(
    kind: Callable[[Any], T], connection: Connection, sql: str, parameters: Parameters = ()
) -> list[T]:
    """Run a query, and return the first column of all rows, converted by ``kind``."""
    return [kind(row[0]) for row in connection.execute(sql, parameters)]


def fetch_value(
    kind: Callable[[Any], T], connection: Connection, sql: str, parameters: Parameters = ()
) -> T | None:
    """Return the first column of a query's first row, converted by ``kind``.

    Returns None if the value is NULL or there is no row.
    """
    row = connection.execute(sql, parameters).fetchone()
    return None if row is None or row[0] is None else kind(row[0])


def exists(connection: Connection, sql: str, parameters: Parameters = ()) -> bool:
    """Return whether a query finds a row."""
    return connection.execute(sql, parameters).fetchone() is not None


def marks(values: Sized) -> str:
    """Return one SQL placeholder per value, for example ``?, ?`` for two values."""
    return ", ".join("?" * len(values))


def stored(value: Any) -> Any:
    """Convert a value for a column: mappings and lists to JSON; others are unchanged."""
    if isinstance(value, Mapping):
        return json.dumps(dict(value))
    return json.dumps(value) if isinstance(value, list) else value


class Conditions:
    """Builder of a WHERE clause: conditions joined by AND, with their parameters."""

    def __init__(self) -> None:
        self._sql: list[str] = []
        self.values: list[Any] = []

    def need(self, sql: str, *values: Any) -> None:
        self._sql.append(sql)
        self.values.extend(values)

    def need_one_of(self, column: str, values: Sequence[Any], *, or_null: bool = False) -> None:
        """Require a column to have one of the values; empty ``values`` match all rows.

        If ``or_null``, rows with NULL in the column also match.
        """
        if values:
            null = f" OR {column} IS NULL" if or_null else ""
            self.need(f"({column} IN ({marks(values)}){null})", *values)

    def need_equal(self, column: str, value: Any) -> None:
        """Require a column to have a value; None matches all rows."""
        if value is not None:
            self.need(f"{column} = ?", value)

    def need_labels(self, column: str, labels: Sequence[str]) -> None:
        """Require the JSON list in a column to contain all labels."""
        for label in labels:
            self.need(f"? IN (SELECT value FROM json_each({column}))", label)  # noqa: S608 - our column

    def need_part(self, column: str, text: str | None) -> None:
        """Require a column to contain ``text``, ignoring case; None and "" match all rows."""
        if text:
            self.need(f"instr(lower({column}), lower(?)) > 0", text)

    @property
    def sql(self) -> str:
        """The WHERE clause, or "" without conditions; SQLite counts faster without WHERE."""
        return f"WHERE {' AND '.join(self._sql)}" if self._sql else ""


class Transaction:
    """A write in progress; collects the topics that are published after its commit."""

    __slots__ = ("_topics", "connection")

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection = connection
        self._topics: set[str] = set()

    def execute(self, sql: str, parameters: Parameters = ()) -> sqlite3.Cursor:
        return self.connection.execute(sql, parameters)

    def executemany(self, sql: str, rows: Iterable[Sequence[Any]]) -> sqlite3.Cursor:
        return self.connection.executemany(sql, rows)

    def insert(self, table: str, columns: Mapping[str, Any], verb: str = "INSERT") -> int:
        """Insert a row and return its id; mappings and lists are stored as JSON.

        ``columns`` maps column name -> value. ``verb`` may be "INSERT OR IGNORE" or "INSERT OR REPLACE". If "INSERT OR IGNORE"
        finds an existing row, the returned id is meaningless. ``table`` and the column names must not be user input.
        """
        names = ", ".join(columns)
        values = [stored(value) for value in columns.values()]
        sql = f"{verb} INTO {table} ({names}) VALUES ({marks(columns)})"
        return int(self.execute(sql, values).lastrowid or 0)

    def count(self, table: str, where: str = "1", parameters: Parameters = ()) -> int:
        return int(self.execute(f"SELECT COUNT(*) FROM {table} WHERE {where}", parameters).fetchone()[0])  # noqa: S608 - constants

    def update(self, table: str, value: int | str, columns: Mapping[str, Any], *, key: str = "id") -> None:
        """Set columns of the row whose column ``key`` equals ``value``.

        ``columns`` maps column name -> new value. Mappings and lists are stored as JSON. ``table`` and the column names must
        not be user input.
        """
        if columns:
            assignments = ", ".join(f"{name} = ?" for name in columns)
            values = [stored(given) for given in columns.values()]
            self.execute(f"UPDATE {table} SET {assignments} WHERE {key} = ?", (*values, value))  # noqa: S608 - as said

    def publish(self, *topics: str) -> None:
        """Queue topics, such as "trial:7", to notify their listeners after the commit."""
        self._topics.update(topics)


_Job: TypeAlias = "tuple[Callable[[Transaction], Any], Future[Any]]"


class Database:
    """The master's SQLite database: one thread writes, any thread reads.

    Args:
        path: the file; created with the schema if neither the file nor a WAL or backup of it exists.
        on_commit: called in the writer thread with the published topics, if any, after a commit.

    Raises:
        DatabaseDamagedError: the file is damaged, or missing although its WAL or a backup exists.
        MasterError: the file has another schema version or cannot be written.
    """

    def __init__(self, path: Path, on_commit: Callable[[set[str]], None] | None = None) -> None:
        self.path = path
        self._on_commit = on_commit
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._idle: list[sqlite3.Connection] = []
        self._lock = threading.Lock()
        self._is_closed = False
        self.damage = ""
        self._failed_write = ("", 0.0)  # reason, monotonic time
        try:
            self._writer_connection = open_for_writer(path)
        except (sqlite3.DatabaseError, OSError) as error:
            raise unusable(path, error) from error
        self._thread = threading.Thread(target=self._run, name="dstrial-writer", daemon=True)
        self._thread.start()

    def submit(self, function: Callable[[Transaction], T]) -> Future[T]:
        """Run ``function`` in the writer thread; the future completes after the commit."""
        future: Future[T] = Future()
        with self._lock:
            if self._is_closed:
                raise self._closed()
            self._jobs.put((function, future))
        return future

    def write(self, function: Callable[[Transaction], T]) -> T:
        """Run ``function`` in the writer thread, and return its result after the commit.

        A call from the writer thread deadlocks.
        """
        return self.submit(function).result()

    @contextlib.contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """Yield a read-only connection with a consistent snapshot.

        Raises:
            DatabaseDamagedError: a page that was read is damaged.
        """
        try:
            connection = self._take_reader()
            try:
                connection.execute("BEGIN")
                try:
                    yield connection
                finally:
                    connection.execute("COMMIT")
            finally:
                self._return_reader(connection)
        except sqlite3.DatabaseError as error:
            translated = self._translated(error)
            if translated is error:
                raise
            raise translated from error

    def _take_reader(self) -> sqlite3.Connection:
        with self._lock:
            if self._is_closed:
                raise self._closed()
            if self._idle:
                return self._idle.pop()
        connection = connect(self.path)
        connection.execute("PRAGMA query_only = 1")
        return connection

    def _return_reader(self, connection: sqlite3.Connection) -> None:
        with self._lock:
            if not self._is_closed and len(self._idle) < _MAX_IDLE_READERS and not connection.in_transaction:
                self._idle.append(connection)
                return
        connection.close()

    def close(self) -> None:
        """Finish submitted writes, checkpoint the WAL, and close the database."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._jobs.put(None)
        for connection in self._idle:
            connection.close()
        self._thread.join()

    def _closed(self) -> MasterError:
        return MasterError(f"{self.path} is closed; expected an open database. Start the master again.")

    def _translated(self, error: BaseException) -> BaseException:
        """Return ``DatabaseDamagedError`` if ``error`` reports damage, else ``error``.

        Damage is also logged, and stored for ``describe_damage``.
        """
        if not is_damage(error):
            return error
        self._record_damage(str(error))
        return DatabaseDamagedError(self.describe_damage())

    def _record_damage(self, what: str) -> None:
        if not self.damage:
            self.damage = what
            logger.critical("%s", self.describe_damage())

    def describe_damage(self) -> str:
        """Return a message about damage found since the master started; "" if none."""
        if not self.damage:
            return ""
        return f"{self.path} is damaged ({self.damage}); expected every page as it was written. {hints.END_AND_PUT_BACK}"

    def describe_trouble(self) -> str:
        """Return a message about damage or a recently failed write; "" if there is none.

        A write failed recently if it failed in the last 30 seconds.
        """
        why, at_s = self._failed_write
        ago_s = time.monotonic() - at_s
        if self.damage or not why or ago_s > _RECENT_S:
            return self.describe_damage()
        return (
            f"{self.path} could not be written {ago_s:.0f} s ago ({why}); expected a working disk with free space. "
            "Free some space: trials wait and retry their reports."
        )

    def _run(self) -> None:
        connection = self._writer_connection
        is_open = True
        while is_open:
            job = self._jobs.get()
            group: list[_Job] = []
            started_s = time.monotonic()
            while job is not None:
                group.append(job)
                if len(group) == _MAX_GROUP or time.monotonic() - started_s > _MAX_GROUP_S:
                    break
                try:
                    job = self._jobs.get_nowait()
                except queue.Empty:
                    break
            is_open = job is not None
            if group:
                self._commit(connection, group)
        connection.close()  # closing the last connection checkpoints the WAL

    def _commit(self, connection: sqlite3.Connection, group: list[_Job]) -> None:
        done: list[tuple[Future[Any], Any]] = []
        topics: set[str] = set()
        try:
            connection.execute("BEGIN IMMEDIATE")
            for function, future in group:
                if future.set_running_or_notify_cancel():
                    self._perform(connection, function, future, done, topics)
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            logger.exception("%s could not be written; the writes of this transaction are lost", self.path)
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            # A successful write does not reset this: on a full disk, a smaller write may still succeed.
            self._failed_write = (str(error), time.monotonic())
            for _, future in group:
                if not future.done():
                    future.set_exception(self._translated(error))
            return
        if topics and self._on_commit is not None:
            # The rows are committed: an error here must not look like a failed write, which clients would retry.
            try:
                self._on_commit(topics)
            except Exception:
                logger.exception("listeners were not notified of %s", ", ".join(sorted(topics)))
        for future, result in done:
            future.set_result(result)

    def _perform(
        self,
        connection: sqlite3.Connection,
        function: Callable[[Transaction], Any],
        future: Future[Any],
        done: list[tuple[Future[Any], Any]],
        topics: set[str],
    ) -> None:
        """Run one submitted function in a savepoint.

        If the function returns, append (future, result) to ``done`` and add the published topics to ``topics``. If the
        function raises, roll back to the savepoint and set the exception of ``future``.

        Raises:
            sqlite3.Error: SQLite rolled back the whole transaction, for example because the disk is full.
        """
        transaction = Transaction(connection)
        connection.execute("SAVEPOINT job")
        try:
            result = function(transaction)
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits for the future
            future.set_exception(error if isinstance(error, OSError) else self._translated(error))
            connection.execute("ROLLBACK TO job")
            connection.execute("RELEASE job")
            return
        connection.execute("RELEASE job")
        topics |= transaction._topics
        done.append((future, result))


def make_cluster_id(tx: Transaction) -> str:
    """Return the cluster id, a UUID; generate it at the first start."""
    tx.insert("cluster", {"key": "cluster_id", "value": str(uuid.uuid4())}, "INSERT OR IGNORE")
    return str(find_cluster_id(tx.connection))


def find_cluster_id(connection: sqlite3.Connection) -> str | None:
    """Return the cluster id; None before the first start."""
    return fetch_value(str, connection, "SELECT value FROM cluster WHERE key = 'cluster_id'")


def ping(connection: sqlite3.Connection) -> None:
    """Read a row to check health; raise ``sqlite3.Error`` on failure."""
    connection.execute("SELECT 1 FROM cluster").fetchone()
