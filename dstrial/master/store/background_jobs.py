"""Queue of background jobs: checkpoint garbage collection and file deletion."""

from __future__ import annotations

import dataclasses
import json
import sqlite3
from collections.abc import Collection
from typing import Any

from dstrial.master.clock import now_us
from dstrial.master.store.database import Transaction, fetch_one


@dataclasses.dataclass(frozen=True, slots=True)
class BackgroundJob:
    """A row of table ``work``, documented in ``schema.sql``."""

    id: int
    kind: str
    experiment_id: int
    payload: str
    created_us: int


def request(tx: Transaction, kind: str, experiment_id: int, payload: dict[str, Any] | None = None) -> None:
    """Enqueue a background job and wake the scheduler.

    ``experiment_id`` is 0 for projects and workspaces. ``kind`` is one of:
    - "gc": delete the checkpoints that the experiment's retention policy does not keep
    - "delete_checkpoints": delete the files of checkpoints ``payload["uuids"]`` that match ``payload["globs"]``
    - "sweep": delete incomplete checkpoints ``payload["uuids"]`` of allocation ``payload["allocation_id"]``
    - "delete_experiment", "delete_tensorboard": delete all data, or the TensorBoard files, of the experiment
    - "delete_project", "delete_workspace": delete row ``payload["id"]``; to be enqueued after the jobs that delete its contents
    """
    columns = {"kind": kind, "experiment_id": experiment_id, "payload": payload or {}}
    tx.insert("work", {**columns, "created_us": now_us()})
    tx.publish("scheduler")


def next_pending(connection: sqlite3.Connection, but: Collection[int] = ()) -> BackgroundJob | None:
    """Return the oldest background job whose id is not in ``but``, or None."""
    sql = "SELECT * FROM work WHERE id NOT IN (SELECT value FROM json_each(?)) ORDER BY id LIMIT 1"
    return fetch_one(BackgroundJob, connection, sql, (json.dumps(list(but)),))


def done(tx: Transaction, work_id: int) -> None:
    tx.execute("DELETE FROM work WHERE id = ?", (work_id,))
