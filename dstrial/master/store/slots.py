"""Which slots a person has switched off, and switching them."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Collection, Mapping

from dstrial.master.clock import now_us
from dstrial.master.store.database import Transaction

AGENT = -1
"""In place of a slot's id: the whole agent."""


def disabled(connection: sqlite3.Connection, slot_ids: Collection[int]) -> Mapping[int, bool]:
    """Return the ``slot_ids`` that are off -> whether what runs there may finish.

    An agent that is switched off switches off all of its slots; ``AGENT`` is among the keys then.
    """
    rows = connection.execute("SELECT slot_id, drain FROM disabled_slots").fetchall()
    off = {int(row["slot_id"]): bool(row["drain"]) for row in rows}
    if AGENT in off:
        return {**dict.fromkeys(slot_ids, off[AGENT]), AGENT: off[AGENT]}
    return {slot_id: drain for slot_id, drain in off.items() if slot_id in slot_ids}


def disable(tx: Transaction, slot_id: int, *, drain: bool, reason: str) -> None:
    """Switch a slot, or with ``AGENT`` all of them, off.

    Args:
        tx: the write.
        slot_id: the slot; ``AGENT`` ends what runs without a slot, too.
        drain: whether what runs there may finish; else it is killed, and goes on where there is room.
        reason: of the kill, for the trial's log.
    """
    tx.execute("INSERT OR REPLACE INTO disabled_slots (slot_id, drain) VALUES (?, ?)", (slot_id, drain))
    if not drain:
        rows = tx.execute(
            "SELECT id, slots FROM allocations WHERE state != 'TERMINATED' AND kill_us IS NULL"
        ).fetchall()
        for row in rows:
            slots = json.loads(row["slots"])
            if slot_id in slots or slot_id == AGENT:
                tx.execute(
                    "UPDATE allocations SET kill_us = ?, kill_reason = ? WHERE id = ?",
                    (now_us(), reason, row["id"]),
                )
                tx.publish(f"allocation:{row['id']}")
    tx.publish("scheduler")


def enable(tx: Transaction, slot_id: int) -> None:
    """Switch a slot on again; ``AGENT`` all that were switched off with the agent."""
    tx.execute("DELETE FROM disabled_slots WHERE slot_id = ?", (slot_id,))
    tx.publish("scheduler")
