"""Queries on tasks: a task executes a trial or a command in allocations (runs)."""

from __future__ import annotations

import dataclasses
import sqlite3
from typing import Any

from dstrial.master.store.allocations import Allocation
from dstrial.master.store.database import Transaction, exists, fetch_all, fetch_one


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """A row of table ``tasks``, documented in ``schema.sql``."""

    id: str
    type: str
    experiment_id: int | None
    trial_id: int | None
    start_us: int
    end_us: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class ActiveAllocation(Allocation):
    priority: int
    config: str
    name: str


def get(connection: sqlite3.Connection, task_id: str) -> Task | None:
    return fetch_one(Task, connection, "SELECT * FROM tasks WHERE id = ?", (task_id,))


def allocations_of(connection: sqlite3.Connection, task_id: str) -> list[Allocation]:
    return fetch_all(
        Allocation, connection, "SELECT * FROM allocations WHERE task_id = ? ORDER BY run_id DESC", (task_id,)
    )


_ACTIVE = (
    "SELECT a.*, COALESCE(c.priority, e.priority) AS priority, COALESCE(c.config, e.config) AS config, "
    "COALESCE(c.description, 'Trial ' || a.trial_id || ' (Experiment ' || a.experiment_id || ')') AS name "
    "FROM allocations a LEFT JOIN experiments e ON e.id = a.experiment_id "
    "LEFT JOIN commands c ON c.task_id = a.task_id WHERE a.state != 'TERMINATED'"
)


def active(connection: sqlite3.Connection) -> list[ActiveAllocation]:
    return fetch_all(ActiveAllocation, connection, f"{_ACTIVE} ORDER BY a.start_us, a.id")


def active_of(connection: sqlite3.Connection, task_id: str) -> ActiveAllocation | None:
    return fetch_one(ActiveAllocation, connection, f"{_ACTIVE} AND a.task_id = ?", (task_id,))


def is_detached(connection: sqlite3.Connection, trial_id: int | None, task_id: str | None) -> bool:
    return exists(
        connection,
        "SELECT 1 FROM trials WHERE id = COALESCE(?, (SELECT trial_id FROM tasks WHERE id = ?)) "
        "AND heartbeat_us IS NOT NULL",
        (trial_id, task_id),
    )


def is_over(
    connection: sqlite3.Connection, trial_id: int | None, task_id: str | None, before_us: int
) -> bool:
    """Return whether a task, or every task of a trial, ended by time ``before_us``.

    Pass one of ``trial_id`` and ``task_id``. If an allocation has not terminated, the result is False.
    """
    of_task, of_allocation, value = (
        ("trial_id", "trial_id", trial_id) if trial_id is not None else ("id", "task_id", task_id)
    )
    return not exists(
        connection,
        f"SELECT 1 FROM tasks WHERE {of_task} = ? AND (end_us IS NULL OR end_us > ?) "  # noqa: S608 - constants
        f"UNION ALL SELECT 1 FROM allocations WHERE {of_allocation} = ? AND state != 'TERMINATED'",
        (value, before_us, value),
    )


def update(tx: Transaction, task_id: str, **columns: Any) -> None:
    tx.update("tasks", task_id, columns)
