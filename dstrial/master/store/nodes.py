"""Queries on remote nodes, and on the state of an allocation on each node."""

from __future__ import annotations

import dataclasses
import sqlite3
from collections.abc import Sequence
from typing import Any

from dstrial.master.store.database import Transaction, fetch_all, fetch_column

OWN_NODE = 0  # node id of the master's machine
MOST_SLOTS = 1024  # per node: slot ids of node *n* start at ``n * MOST_SLOTS``


def node_of(slot_id: int) -> int:
    return slot_id // MOST_SLOTS


def index_of(slot_id: int) -> int:
    """Return the index of a slot on its node, from 0."""
    return slot_id % MOST_SLOTS


def slot_id_of(node_id: int, index: int) -> int:
    return node_id * MOST_SLOTS + index


def agent_key(node_id: int) -> int:
    """Return the negative number that stands for a node in table ``disabled_slots``."""
    return -1 - node_id


@dataclasses.dataclass(frozen=True, slots=True)
class AllocationNode:
    """A row of table ``allocation_nodes``, documented in ``schema.sql``."""

    allocation_id: str
    node_id: int
    rank: int
    pid: int | None
    start_time: str | None
    log_offset: int
    log_lines: int
    exit_code: int | None
    signal: int | None
    cause: str | None


def ids_of(tx: Transaction, names: Sequence[str]) -> dict[str, int]:
    """Return node name -> id; a new name is assigned the next id permanently."""
    for name in names:
        tx.insert("nodes", {"name": name}, "INSERT OR IGNORE")
    known = dict(tx.execute("SELECT name, id FROM nodes").fetchall())
    return {name: known[name] for name in names}


def parts_of(connection: sqlite3.Connection, allocation_id: str) -> dict[int, AllocationNode]:
    """Return node id -> row, for each remote node of an allocation."""
    rows = fetch_all(
        AllocationNode,
        connection,
        "SELECT * FROM allocation_nodes WHERE allocation_id = ? ORDER BY rank",
        (allocation_id,),
    )
    return {row.node_id: row for row in rows}


def insert_parts(tx: Transaction, allocation_id: str, node_ids: Sequence[int]) -> None:
    """Store the nodes of an allocation; ``node_ids`` are in the order of their ranks."""
    for rank, node_id in enumerate(node_ids):
        columns = {"allocation_id": allocation_id, "node_id": node_id, "rank": rank}
        tx.insert("allocation_nodes", columns, "INSERT OR IGNORE")


def update_part(tx: Transaction, allocation_id: str, node_id: int, **columns: Any) -> None:
    assignments = ", ".join(f"{name} = ?" for name in columns)
    tx.execute(
        f"UPDATE allocation_nodes SET {assignments} WHERE allocation_id = ? AND node_id = ?",  # noqa: S608 - names of ours
        (*columns.values(), allocation_id, node_id),
    )


def advance_log(
    tx: Transaction, allocation_id: str, node_id: int, before: int, after: int, num_lines: int
) -> bool:
    """Advance the byte offset up to which an allocation's log on a node is stored.

    Moves the offset from ``before`` to ``after``, with ``num_lines`` lines in between, and returns True. If the current offset
    is not ``before``, changes nothing and returns False.
    """
    table, row = "allocation_nodes", "allocation_id = :id AND node_id = :node"
    if node_id == OWN_NODE:
        table, row = "allocations", "id = :id"
    cursor = tx.execute(
        f"UPDATE {table} SET log_offset = :after, log_lines = log_lines + :lines WHERE {row} AND log_offset = :before",  # noqa: S608 - constants
        {"id": allocation_id, "node": node_id, "before": before, "after": after, "lines": num_lines},
    )
    return bool(cursor.rowcount)


def exclude(tx: Transaction, trial_id: int, node_id: int) -> None:
    """Exclude a node from a trial's future allocations."""
    tx.insert("excluded_nodes", {"trial_id": trial_id, "node_id": node_id}, "INSERT OR IGNORE")


def excluded_for(connection: sqlite3.Connection, trial_id: int) -> frozenset[int]:
    sql = "SELECT node_id FROM excluded_nodes WHERE trial_id = ?"
    return frozenset(fetch_column(int, connection, sql, (trial_id,)))
