"""Queries on allocations (one run of a task on some slots), and usage reports."""

from __future__ import annotations

import dataclasses
import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any

from dstrial.config.experiment_config.command import NAMES
from dstrial.master.clock import now_us
from dstrial.master.store.database import Transaction, fetch_all, fetch_one
from dstrial.master.store.errors import Hint, required


@dataclasses.dataclass(frozen=True, slots=True)
class Allocation:
    """A row of table ``allocations``, documented in ``schema.sql``."""

    id: str
    task_id: str
    trial_id: int
    experiment_id: int
    run_id: int
    state: str
    slots: tuple[int, ...]  # slot ids, in rank order
    ports: dict[str, int]  # environment variable -> port
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
    log_lines: int
    start_us: int
    end_us: int | None
    exit_code: int | None
    exit_reason: str | None
    workspace_name: str | None

    @property
    def is_command(self) -> bool:
        return not self.trial_id


def get(connection: sqlite3.Connection, allocation_id: str) -> Allocation | None:
    return fetch_one(Allocation, connection, "SELECT * FROM allocations WHERE id = ?", (allocation_id,))


def require(connection: sqlite3.Connection, allocation_id: str) -> Allocation:
    return required(get(connection, allocation_id), f"allocation {allocation_id}", Hint.LIST_ALLOCATIONS)


def _where(connection: sqlite3.Connection, condition: str, *values: object) -> list[Allocation]:
    return fetch_all(Allocation, connection, f"SELECT * FROM allocations WHERE {condition}", values)  # noqa: S608 - ours


def live(connection: sqlite3.Connection, trial_id: int) -> Allocation | None:
    """Return the trial's allocation that has not terminated (at most one), or None."""
    return next(iter(_where(connection, "trial_id = ? AND state != 'TERMINATED'", trial_id)), None)


def all_live(connection: sqlite3.Connection) -> list[Allocation]:
    return _where(connection, "state IN ('ASSIGNED', 'RUNNING') ORDER BY start_us")


def update(tx: Transaction, allocation_id: str, **columns: Any) -> None:
    tx.update("allocations", allocation_id, columns)


def insert(
    tx: Transaction,
    *,
    task_id: str,
    run_id: int,
    slots: Sequence[int],
    ports: Mapping[str, int],
    directory: str,
    **others: Any,
) -> str:
    """Insert an allocation in state ASSIGNED, and return its id.

    ``ports`` maps environment variable -> port. ``directory`` is the parent of the allocation's directory. ``others`` are
    further columns.
    """
    allocation_id = f"{task_id}.{run_id}"
    columns = {
        "id": allocation_id,
        "task_id": task_id,
        "trial_id": 0,  # a command has neither trial nor experiment
        "experiment_id": 0,
        "run_id": run_id,
        "state": "ASSIGNED",
        "slots": list(slots),
        "ports": ports,
        "directory": f"{directory}/{allocation_id}",
        "start_us": now_us(),
    }
    tx.insert("allocations", {**columns, **others})
    return allocation_id


def last_runs(connection: sqlite3.Connection, trial_id: int, run_id: int, limit: int) -> list[Allocation]:
    """Return a trial's last ``limit`` allocations up to run ``run_id``, newest first."""
    condition = "trial_id = ? AND run_id <= ? ORDER BY run_id DESC LIMIT ?"
    return _where(connection, condition, trial_id, run_id, limit)


def of_experiment(connection: sqlite3.Connection, experiment_id: int) -> list[Allocation]:
    return _where(connection, "experiment_id = ?", experiment_id)


def note_report(tx: Transaction, trial_id: int, run_id: int, *, has_trained: bool) -> None:
    """Mark a run's allocation as ready; if ``has_trained``, increment ``num_reports``.

    ``has_trained`` is False for a profiling report, which has no batch number.
    """
    # Any report proves that the trial's code has started.
    tx.execute(
        "UPDATE allocations SET num_reports = num_reports + ?, is_ready = 1 WHERE trial_id = ? AND run_id = ?",
        (int(has_trained), trial_id, run_id),
    )


_USED_BY_TRIALS = (
    "SELECT a.id AS allocation_id, k.type AS kind, e.owner_id AS user_id, u.username, a.experiment_id, "
    "COALESCE(a.workspace_name, w.name) AS workspace_name, "
    "e.labels, json_array_length(a.slots) AS num_slots, a.start_us AS start_us, a.end_us AS end_us, a.trial_id "
    "FROM allocations a JOIN tasks k ON k.id = a.task_id JOIN experiments e ON e.id = a.experiment_id "
    "JOIN users u ON u.id = e.owner_id JOIN projects p ON p.id = e.project_id JOIN workspaces w ON w.id = p.workspace_id"
)
_USED_BY_COMMANDS = (
    "SELECT a.id AS allocation_id, c.kind, c.owner_id AS user_id, u.username, 0 AS experiment_id, "
    "COALESCE(a.workspace_name, w.name, '') AS workspace_name, "
    "'[]' AS labels, json_array_length(a.slots) AS num_slots, a.start_us AS start_us, a.end_us AS end_us, NULL AS trial_id "
    "FROM allocations a JOIN commands c ON c.task_id = a.task_id JOIN users u ON u.id = c.owner_id "
    "LEFT JOIN workspaces w ON w.id = c.workspace_id"
)
_REPORTS = (
    "SELECT end_us AS time_us, CASE group_name WHEN 'validation' THEN 'validation' ELSE 'training' END AS kind FROM metrics "
    "WHERE trial_id = :trial_id AND steps >= 0 "
    "UNION ALL SELECT report_us, 'checkpointing' FROM checkpoints WHERE trial_id = :trial_id ORDER BY time_us"
)


@dataclasses.dataclass(frozen=True, slots=True)
class AllocationUsage:
    """Slot usage of one allocation, for usage reports."""

    allocation_id: str
    kind: str  # task type, for example TRIAL
    user_id: int
    username: str
    experiment_id: int  # 0 for a command
    workspace_name: str  # name at the start of the allocation
    labels: tuple[str, ...]  # of the experiment
    num_slots: int
    start_us: int
    end_us: int | None  # None while running
    trial_id: int | None  # None for a command


def uses(connection: sqlite3.Connection, after_us: int, before_us: int) -> list[AllocationUsage]:
    """Return the slot usage of allocations that overlap a time range, oldest first."""
    sql = (
        f"{_USED_BY_TRIALS} WHERE a.start_us < :before AND (a.end_us IS NULL OR a.end_us > :after) "
        f"UNION ALL {_USED_BY_COMMANDS} WHERE a.start_us < :before AND (a.end_us IS NULL OR a.end_us > :after) "
        "ORDER BY start_us, allocation_id"
    )
    return fetch_all(AllocationUsage, connection, sql, {"before": before_us, "after": after_us})


def spans(connection: sqlite3.Connection, use: AllocationUsage, now_us: int) -> list[tuple[str, int, int]]:
    """Return the intervals of an allocation as (activity, start us, end us).

    A command has one interval, whose activity is the command's kind in lower case. A trial's activities are "training",
    "validation" and "checkpointing". The interval between two reports has the activity that the second report describes. Time
    after the last report counts as training. ``now_us`` is the end of an allocation that has not ended.
    """
    end_us = now_us if use.end_us is None else use.end_us
    if use.kind in NAMES:
        return [(use.kind.lower(), use.start_us, end_us)]
    found, position = [], use.start_us
    if use.trial_id is not None:
        for row in connection.execute(_REPORTS, {"trial_id": use.trial_id}):
            if position < row["time_us"] <= end_us:
                found.append((str(row["kind"]), position, int(row["time_us"])))
                position = int(row["time_us"])
    if position < end_us:
        found.append(("training", position, end_us))
    return found
