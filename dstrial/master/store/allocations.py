"""Rows of allocations."""

from __future__ import annotations

import sqlite3

from dstrial.master.store.errors import Hint, NotFoundError


def get(connection: sqlite3.Connection, allocation_id: str) -> sqlite3.Row | None:
    """Return an allocation's row, None if it does not exist."""
    row: sqlite3.Row | None = connection.execute(
        "SELECT * FROM allocations WHERE id = ?", (allocation_id,)
    ).fetchone()
    return row


def require(connection: sqlite3.Connection, allocation_id: str) -> sqlite3.Row:
    """Return an allocation's row.

    Raises:
        NotFoundError: there is none.
    """
    row = get(connection, allocation_id)
    if row is None:
        raise NotFoundError(f"allocation {allocation_id} is not found", Hint.LIST_ALLOCATIONS)
    return row


def live(connection: sqlite3.Connection, trial_id: int) -> sqlite3.Row | None:
    """Return the allocation of a trial that has not ended; there is at most one."""
    row: sqlite3.Row | None = connection.execute(
        "SELECT * FROM allocations WHERE trial_id = ? AND state != 'TERMINATED'", (trial_id,)
    ).fetchone()
    return row


def all_live(connection: sqlite3.Connection) -> list[sqlite3.Row]:
    """Return every allocation that has not ended, oldest first."""
    return connection.execute(
        "SELECT * FROM allocations WHERE state IN ('ASSIGNED', 'RUNNING') ORDER BY start_us"
    ).fetchall()


def not_ended(connection: sqlite3.Connection) -> list[sqlite3.Row]:
    """Return every allocation that has not ended, by id."""
    return connection.execute("SELECT * FROM allocations WHERE state != 'TERMINATED' ORDER BY id").fetchall()
