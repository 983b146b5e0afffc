"""Queries on commands (tasks without a trial) and the files uploaded with them."""

from __future__ import annotations

import dataclasses
import json
import sqlite3
import uuid
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from dstrial.config.experiment_config.command import NAMES, CommandConfig, CommandKind
from dstrial.master.clock import now_us
from dstrial.master.store.database import Transaction, fetch_all, fetch_column, fetch_value
from dstrial.master.store.errors import Hint, NotFoundError

ENDED = frozenset({"COMPLETED", "CANCELED", "ERROR"})  # terminal states

_SHOWN_US = 24 * 3600 * 1_000_000  # lists show a command until one day after its end
_SELECT = (
    "SELECT c.*, u.username, u.display_name, a.id AS allocation_id, a.state AS allocation_state, a.is_ready, "
    "a.resources_id, a.slots, a.ports FROM commands c JOIN users u ON u.id = c.owner_id "
    "LEFT JOIN allocations a ON a.task_id = c.task_id AND a.state != 'TERMINATED'"
)
_IN_ORDER = "ORDER BY c.priority, c.queue_position, c.task_id"


@dataclasses.dataclass(frozen=True, slots=True)
class Command:
    """A row of table ``commands``, documented in ``schema.sql``."""

    task_id: str
    kind: str
    job_id: str
    state: str
    description: str
    config: str
    owner_id: int
    workspace_id: int
    num_slots: int
    priority: int
    queue_position: float
    run_id: int
    is_pausable: bool
    parent_id: str | None
    forked_from: str | None
    experiment_ids: str
    trial_ids: str
    stop_reason: str | None
    exit_status: str | None
    start_us: int
    end_us: int | None
    original_config: str | None


@dataclasses.dataclass(frozen=True, slots=True)
class CommandInfo(Command):
    username: str
    display_name: str
    allocation_id: str | None
    allocation_state: str | None
    is_ready: bool | None
    resources_id: str | None
    slots: str | None
    ports: str | None


@dataclasses.dataclass(frozen=True, slots=True)
class NewCommand:
    """Values of a new command, for :func:`insert`."""

    kind: CommandKind
    spec: CommandConfig
    owner_id: int
    workspace_id: int
    tgz: bytes = b""  # uploaded files, tar.gz
    experiment_ids: Sequence[int] = ()  # shown by a TensorBoard
    trial_ids: Sequence[int] = ()
    is_pausable: bool = False
    parent_id: str | None = None  # task id of the parent generic task
    forked_from: str | None = None  # task id of the forked generic task
    original: Mapping[str, Any] | None = None  # config as submitted; None for kinds that do not show it


def insert(tx: Transaction, new: NewCommand) -> str:
    task_id, now = str(uuid.uuid4()), now_us()
    same = ("kind", "owner_id", "workspace_id", "is_pausable", "parent_id", "forked_from")
    columns = {
        **{name: getattr(new, name) for name in same},
        "task_id": task_id,
        "job_id": str(uuid.uuid4()),
        "state": "ACTIVE",
        "description": new.spec.config["description"],
        "config": new.spec.config,
        "num_slots": new.spec.num_slots,
        "priority": new.spec.priority,
        "queue_position": float(now),
        "experiment_ids": list(new.experiment_ids),
        "trial_ids": list(new.trial_ids),
        "start_us": now,
        "original_config": None if new.original is None else json.dumps(new.original, default=str),
    }
    tx.insert("commands", columns)
    tx.insert("tasks", {"id": task_id, "type": new.kind, "start_us": now})
    if new.tgz or new.kind == "GENERIC":
        # A generic task has a row even without files: a missing row means that the files were deleted, which prevents forks.
        tx.insert("command_contexts", {"task_id": task_id, "tgz": new.tgz})
    return task_id


def _where(connection: sqlite3.Connection, condition: str, *values: object) -> list[CommandInfo]:
    return fetch_all(CommandInfo, connection, f"{_SELECT} WHERE {condition}", values)


def get(connection: sqlite3.Connection, task_id: str) -> CommandInfo | None:
    return next(iter(_where(connection, "c.task_id = ?", task_id)), None)


def require(
    connection: sqlite3.Connection, task_id: str, kinds: Collection[str] = tuple(NAMES)
) -> CommandInfo:
    row = get(connection, task_id)
    if row is None or row.kind not in kinds:
        what = " or ".join(NAMES[kind] for kind in kinds)
        raise NotFoundError(f"{what} {task_id[:80]!r} is not found; expected the id of one.", Hint.LIST_TASKS)
    return row


def context(connection: sqlite3.Connection, task_id: str) -> bytes | None:
    """Return the files uploaded with a command, as tar.gz; None if absent or deleted."""
    return fetch_value(bytes, connection, "SELECT tgz FROM command_contexts WHERE task_id = ?", (task_id,))


def listing(connection: sqlite3.Connection, kind: CommandKind, now: int) -> list[CommandInfo]:
    """Return commands of a kind that are active or ended in the day before ``now``.

    ``now`` is in microseconds. The oldest command is first.
    """
    condition = "c.kind = ? AND (c.end_us IS NULL OR c.end_us > ?) ORDER BY c.start_us, c.task_id"
    return _where(connection, condition, kind, now - _SHOWN_US)


def newest(connection: sqlite3.Connection, limit: int) -> list[CommandInfo]:
    """Return the ``limit`` newest commands and all active ones, newest first."""
    recent = "SELECT task_id FROM commands ORDER BY start_us DESC LIMIT ?"
    condition = f"c.end_us IS NULL OR c.task_id IN ({recent}) ORDER BY c.start_us DESC, c.task_id"
    return _where(connection, condition, limit)


def queued(connection: sqlite3.Connection) -> list[CommandInfo]:
    """Return running and pending commands, highest priority first."""
    return _where(connection, f"c.state = 'ACTIVE' OR a.id IS NOT NULL {_IN_ORDER}")


def waiting(connection: sqlite3.Connection) -> list[CommandInfo]:
    """Return pending commands, highest priority first."""
    return _where(connection, f"c.state = 'ACTIVE' AND a.id IS NULL {_IN_ORDER}")


def tree(connection: sqlite3.Connection, task_id: str) -> list[str]:
    """Return the ids of a task and all its descendants."""
    sql = (
        "WITH RECURSIVE below(id) AS (SELECT ? UNION SELECT c.task_id FROM commands c JOIN below b ON c.parent_id = b.id) "
        "SELECT id FROM below"
    )
    return fetch_column(str, connection, sql, (task_id,))


def root(connection: sqlite3.Connection, task_id: str) -> str:
    """Return the id of a task's topmost ancestor; its own id if it has no parent."""
    sql = (
        "WITH RECURSIVE above(id, parent_id) AS (SELECT task_id, parent_id FROM commands WHERE task_id = ? "
        "UNION SELECT c.task_id, c.parent_id FROM commands c JOIN above a ON c.task_id = a.parent_id) "
        "SELECT id FROM above WHERE parent_id IS NULL"
    )
    return fetch_value(str, connection, sql, (task_id,)) or task_id


def update(tx: Transaction, task_id: str, **columns: Any) -> None:
    tx.update("commands", task_id, columns, key="task_id")


def forget_context(tx: Transaction, task_id: str) -> None:
    tx.execute("DELETE FROM command_contexts WHERE task_id = ?", (task_id,))
