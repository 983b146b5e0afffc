"""Trials whose number of slots may change, and what they have measured on each."""

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
    """A trial that trains and may be asked to stop.

    It comes with what its experiment says of slots.

    Attributes:
        slots: JSON list of ids.
        start_us: when its allocation began.
        max_slots: how many its experiment may use at once; None for any number.
        section: JSON of ``data.dstrial``; None without one.
    """

    allocation_id: str
    trial_id: int
    experiment_id: int
    slots: str
    start_us: int
    slots_per_trial: int
    max_slots: int | None
    priority: int
    queue_position: float
    section: str | None


def resizable_trials(connection: sqlite3.Connection) -> list[ResizableTrial]:
    """Return the trials that can be asked to stop, the most urgent first.

    They stop with a checkpoint.
    """
    return fetch_all(ResizableTrial, connection, _RESIZABLE)


@dataclasses.dataclass(frozen=True, slots=True)
class RunSpan:
    """A run of a trial, and how far its training reports reach.

    Attributes:
        start_us: when it began.
        preempt_us: when it was asked to stop; None if it was not.
        end_us: when it ended; None while it runs.
        num_reports: training reports, counted as far as was asked for; the four fields behind it are None
            without one.
        first_steps: batches at the first.
        last_steps: batches at the last.
        first_us: when the first was made.
        last_us: when the last was made.
    """

    run_id: int
    num_slots: int
    steps_at_start: int
    start_us: int
    preempt_us: int | None
    end_us: int | None
    num_reports: int
    first_steps: int | None
    last_steps: int | None
    first_us: int | None
    last_us: int | None


# In this order: the index is searched from the first bound of ``steps``, and the other one says that it has
# all of them. A run reports nothing below its checkpoint.
_OF_RUN = (
    "FROM metrics m WHERE m.trial_id = a.trial_id AND m.group_name = 'training' "
    "AND m.steps >= a.steps_at_start AND m.steps >= 0 AND m.run_id = a.run_id AND a.num_reports > 0"
)
_RUN_SPANS = f"""
SELECT a.run_id, json_array_length(a.slots) AS num_slots, a.steps_at_start, a.start_us,
    a.preempt_us, a.end_us,
    (SELECT COUNT(*) FROM (SELECT 1 {_OF_RUN} LIMIT :count_to)) AS num_reports,
    first.steps AS first_steps, last.steps AS last_steps, first.end_us AS first_us, last.end_us AS last_us
FROM allocations a
    LEFT JOIN metrics first ON first.id = (SELECT m.id {_OF_RUN} ORDER BY m.steps LIMIT 1)
    LEFT JOIN metrics last ON last.id = (SELECT m.id {_OF_RUN} ORDER BY m.steps DESC LIMIT 1)
WHERE a.trial_id = :trial_id AND a.run_id > :after_run
ORDER BY a.run_id
"""  # noqa: S608 - a constant


def run_spans(
    connection: sqlite3.Connection, trial_id: int, *, count_to: int, after_run: int = 0
) -> list[RunSpan]:
    """Return the runs of a trial, the first one first.

    What the newest one costs does not depend on how much was reported; for each one before it, what later
    ones have reported is passed over. Those do not change any more.

    Args:
        connection: to read by.
        trial_id: the trial.
        count_to: how many reports of a run are counted at most.
        after_run: only runs after this one.
    """
    values = {"trial_id": trial_id, "count_to": count_to, "after_run": after_run}
    return fetch_all(RunSpan, connection, _RUN_SPANS, values)


def slots_of_run_before(connection: sqlite3.Connection, trial_id: int, run_id: int) -> int:
    """Return how many slots the run before this one had, 0 for the first run."""
    row = connection.execute(
        "SELECT json_array_length(slots) FROM allocations WHERE trial_id = ? AND run_id < ? ORDER BY run_id DESC LIMIT 1",
        (trial_id, run_id),
    ).fetchone()
    return 0 if row is None else int(row[0])


def unusable_counts(connection: sqlite3.Connection, trial_id: int) -> frozenset[int]:
    """Return the numbers of slots with which a trial has never trained.

    It has not since its own code gave sizes that do not fit them. What a trial's code gives DeepSpeed by itself is known only
    when it runs. One that has not trained with any number yet has another problem.
    """
    rows = connection.execute(
        "SELECT json_array_length(slots) AS count FROM allocations WHERE trial_id = :trial_id GROUP BY count "
        "HAVING SUM(num_reports) = 0 AND SUM(exit_reason LIKE '%ConfigError: %') > 0 "
        "AND (SELECT SUM(num_reports) FROM allocations WHERE trial_id = :trial_id) > 0",
        {"trial_id": trial_id},
    )
    return frozenset(int(row["count"]) for row in rows)
