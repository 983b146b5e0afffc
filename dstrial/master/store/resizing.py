"""Trials whose slot count may change (elastic training)."""

from __future__ import annotations

import dataclasses
import sqlite3

from dstrial.master.store.database import fetch_all

_RESIZABLE = """
SELECT a.id AS allocation_id, a.trial_id, a.experiment_id, a.slots, a.start_us, e.slots_per_trial, e.max_slots, e.priority,
    e.queue_position, CASE WHEN json_valid(e.config) THEN json_extract(e.config, '$.data.dstrial') END AS section
FROM allocations a JOIN trials t ON t.id = a.trial_id JOIN experiments e ON e.id = a.experiment_id
WHERE a.state = 'RUNNING' AND a.is_ready AND a.preempt_us IS NULL AND a.kill_us IS NULL
    AND t.state = 'ACTIVE' AND e.state = 'ACTIVE' AND e.unmanaged = 0 AND json_array_length(a.slots) > 0
ORDER BY e.priority, e.queue_position, a.trial_id
"""


@dataclasses.dataclass(frozen=True, slots=True)
class ResizableTrial:
    """A running trial that can be preempted for a change of its slot count."""

    allocation_id: str
    trial_id: int
    experiment_id: int
    slots: str  # JSON list of slot ids
    start_us: int
    slots_per_trial: int
    max_slots: int | None  # limit of the whole experiment; None: unlimited
    priority: int
    queue_position: float
    section: str | None  # ``data.dstrial`` as JSON


def resizable_trials(connection: sqlite3.Connection) -> list[ResizableTrial]:
    """Return trials that can be stopped with a checkpoint, in queue order."""
    return fetch_all(ResizableTrial, connection, _RESIZABLE)


def slots_of_run_before(connection: sqlite3.Connection, trial_id: int, run_id: int) -> int:
    """Return the slot count of the previous run; 0 for the first run."""
    row = connection.execute(
        "SELECT json_array_length(slots) FROM allocations WHERE trial_id = ? AND run_id < ? ORDER BY run_id DESC LIMIT 1",
        (trial_id, run_id),
    ).fetchone()
    return 0 if row is None else int(row[0])


def unusable_counts(connection: sqlite3.Connection, trial_id: int) -> frozenset[int]:
    """Return slot counts on which the trial failed because of its batch sizes.

    Sizes that trial code passes to DeepSpeed directly are known only at run time. Failures of a trial that has never trained do
    not count.
    """
    rows = connection.execute(
        "SELECT json_array_length(slots) AS count FROM allocations WHERE trial_id = :trial_id GROUP BY count "
        "HAVING SUM(num_reports) = 0 AND SUM(exit_reason LIKE '%ConfigError: %') > 0 "
        "AND (SELECT SUM(num_reports) FROM allocations WHERE trial_id = :trial_id) > 0",
        {"trial_id": trial_id},
    )
    return frozenset(int(row["count"]) for row in rows)
