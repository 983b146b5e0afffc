"""Rows of allocations."""

from __future__ import annotations

import dataclasses
import sqlite3

from dstrial.master.store.database import fetch_all, fetch_one
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
