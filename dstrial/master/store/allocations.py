"""Rows of allocations."""

from __future__ import annotations

import dataclasses
import json
import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any

from dstrial.master.clock import now_us
from dstrial.master.store.database import Transaction, fetch_all, fetch_one
from dstrial.master.store.errors import Hint, NotFoundError


@dataclasses.dataclass(frozen=True, slots=True)
class Allocation:
    """A row of allocations; ``schema.sql`` says what the columns hold."""

    id: str
    task_id: str
    trial_id: int
    experiment_id: int
    run_id: int
    state: str
    slots: str
    ports: str
    resources_id: str
    directory: str
    supervisor_pid: int | None
    supervisor_start: str | None
    is_ready: bool
    steps_at_start: int
    checkpoint_uuid: str | None
    preempt_us: int | None
    preempt_deadline_us: int | None
    preempt_acked: bool
    kill_us: int | None
    kill_reason: str | None
    num_reports: int
    log_offset: int
    start_us: int
    end_us: int | None
    exit_code: int | None
    exit_reason: str | None
    workspace_name: str | None


def get(connection: sqlite3.Connection, allocation_id: str) -> Allocation | None:
    """Return an allocation's row, None if it does not exist."""
    return fetch_one(Allocation, connection, "SELECT * FROM allocations WHERE id = ?", (allocation_id,))


def require(connection: sqlite3.Connection, allocation_id: str) -> Allocation:
    """Return an allocation's row.

    Raises:
        NotFoundError: there is none.
    """
    row = get(connection, allocation_id)
    if row is None:
        raise NotFoundError(f"allocation {allocation_id} is not found", Hint.LIST_ALLOCATIONS)
    return row


def live(connection: sqlite3.Connection, trial_id: int) -> Allocation | None:
    """Return the allocation of a trial that has not ended; there is at most one."""
    return fetch_one(
        Allocation,
        connection,
        "SELECT * FROM allocations WHERE trial_id = ? AND state != 'TERMINATED'",
        (trial_id,),
    )


def all_live(connection: sqlite3.Connection) -> list[Allocation]:
    """Return every allocation that has not ended, oldest first."""
    return fetch_all(
        Allocation,
        connection,
        "SELECT * FROM allocations WHERE state IN ('ASSIGNED', 'RUNNING') ORDER BY start_us",
    )


def not_ended(connection: sqlite3.Connection) -> list[Allocation]:
    """Return every allocation that has not ended, by id."""
    return fetch_all(
        Allocation, connection, "SELECT * FROM allocations WHERE state != 'TERMINATED' ORDER BY id"
    )


def update(tx: Transaction, allocation_id: str, **columns: Any) -> None:
    """Set columns of an allocation."""
    tx.update("allocations", allocation_id, columns)


def insert(
    tx: Transaction,
    *,
    task_id: str,
    run_id: int,
    slots: Sequence[int],
    ports: Mapping[str, int],
    resources_id: str,
    directory: str,
    workspace_name: str | None,
    trial_id: int = 0,
    experiment_id: int = 0,
    steps_at_start: int = 0,
    checkpoint_uuid: str | None = None,
) -> str:
    """Store a new allocation of a task and return its id.

    Args:
        tx: the write.
        task_id: the task.
        run_id: how many it has had, with this one.
        slots: slot ids.
        ports: port by environment variable.
        resources_id: a UUID.
        directory: parent of the allocation's directory.
        workspace_name: where it belongs now.
        trial_id: its trial; 0 for a command.
        experiment_id: its experiment; 0 for a command.
        steps_at_start: batches of the checkpoint that it starts from.
        checkpoint_uuid: that checkpoint.
    """
    allocation_id = f"{task_id}.{run_id}"
    tx.execute(
        "INSERT INTO allocations (id, task_id, trial_id, experiment_id, run_id, state, slots, ports, resources_id, "
        "directory, steps_at_start, checkpoint_uuid, start_us, workspace_name) "
        "VALUES (?, ?, ?, ?, ?, 'ASSIGNED', ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            allocation_id,
            task_id,
            trial_id,
            experiment_id,
            run_id,
            json.dumps(slots),
            json.dumps(ports),
            resources_id,
            f"{directory}/{allocation_id}",
            steps_at_start,
            checkpoint_uuid,
            now_us(),
            workspace_name,
        ),
    )
    return allocation_id


def last_runs(connection: sqlite3.Connection, trial_id: int, run_id: int, limit: int) -> list[Allocation]:
    """Return the allocations of a trial up to a run, the latest first."""
    return fetch_all(
        Allocation,
        connection,
        "SELECT * FROM allocations WHERE trial_id = ? AND run_id <= ? ORDER BY run_id DESC LIMIT ?",
        (trial_id, run_id, limit),
    )


def of_experiment(connection: sqlite3.Connection, experiment_id: int) -> list[Allocation]:
    """Return all allocations of an experiment."""
    return fetch_all(
        Allocation, connection, "SELECT * FROM allocations WHERE experiment_id = ?", (experiment_id,)
    )


def count_ended_as(connection: sqlite3.Connection, task_id: str, reason: str) -> int:
    """Return how many allocations of a task have ended for a reason."""
    count = "SELECT COUNT(*) FROM allocations WHERE task_id = ? AND exit_reason = ?"
    return int(connection.execute(count, (task_id, reason)).fetchone()[0])


def note_report(tx: Transaction, trial_id: int, run_id: int) -> None:
    """Count a report of a run, which shows that the trial's code runs."""
    tx.execute(
        "UPDATE allocations SET num_reports = num_reports + 1, is_ready = 1 WHERE trial_id = ? AND run_id = ?",
        (trial_id, run_id),
    )


def advance_log(tx: Transaction, allocation_id: str, before: int, after: int) -> bool:
    """Store how far a log is taken in, and say whether it was where ``before`` says."""
    cursor = tx.execute(
        "UPDATE allocations SET log_offset = ? WHERE id = ? AND log_offset = ?",
        (after, allocation_id, before),
    )
    return bool(cursor.rowcount)
