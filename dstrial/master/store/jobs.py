"""Queries of the scheduler: queue of jobs, resizable trials, disabled slots."""

from __future__ import annotations

import dataclasses
import json
import sqlite3
from collections.abc import Collection, Mapping

from dstrial.master.clock import now_us
from dstrial.master.store.commands import Command
from dstrial.master.store.database import Transaction, fetch_all, fetch_column, fetch_one, fetch_value
from dstrial.master.store.experiments import Experiment
from dstrial.master.store.nodes import OWN_NODE, agent_key, node_of

_QUEUE = """
SELECT e.*, p.workspace_id, u.username AS owner_name, j.num_active, a.num_allocations, a.num_slots
FROM experiments e
JOIN users u ON u.id = e.owner_id
JOIN projects p ON p.id = e.project_id
LEFT JOIN (SELECT experiment_id, COUNT(*) AS num_active FROM trials WHERE state = 'ACTIVE' GROUP BY experiment_id) j
    ON j.experiment_id = e.id
LEFT JOIN (SELECT experiment_id, COUNT(*) AS num_allocations, SUM(json_array_length(slots)) AS num_slots
           FROM allocations WHERE state != 'TERMINATED' GROUP BY experiment_id) a ON a.experiment_id = e.id
WHERE (e.state = 'ACTIVE' AND e.unmanaged = 0) OR a.num_allocations > 0
ORDER BY e.priority, e.queue_position, e.id
"""


@dataclasses.dataclass(frozen=True, slots=True)
class QueuedExperiment(Experiment):
    workspace_id: int
    owner_name: str
    num_active: int | None
    num_allocations: int | None
    num_slots: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class WaitingTrial:
    """A pending trial, with the scheduling settings of its experiment."""

    id: int
    experiment_id: int
    run_id: int  # number of allocations so far
    task_id: str
    is_node_excluded: int  # 2: a log policy excludes nodes, and the trial has failed since it matched
    slots_per_trial: int
    max_slots: int | None  # limit of the whole experiment; None: unlimited
    priority: int  # 1 is the highest
    queue_position: float
    section: str | None  # ``data.dstrial`` of the config as JSON; None before the first run


def queued_experiments(connection: sqlite3.Connection) -> list[QueuedExperiment]:
    """Return the queued and running experiments, in queue order.

    These are the active experiments that are not unmanaged, and all experiments with an allocation that has not terminated.
    """
    return fetch_all(QueuedExperiment, connection, _QUEUE)


def count_without_slots(connection: sqlite3.Connection) -> int:
    """Count active experiments whose allocations, if any, have all terminated."""
    sql = (
        "SELECT COUNT(*) FROM experiments e WHERE state = 'ACTIVE' AND NOT EXISTS "
        "(SELECT 1 FROM allocations a WHERE a.experiment_id = e.id AND a.state != 'TERMINATED')"
    )
    return fetch_value(int, connection, sql) or 0


def experiment_of(connection: sqlite3.Connection, job_id: str) -> Experiment | None:
    return fetch_one(Experiment, connection, "SELECT * FROM experiments WHERE job_id = ?", (job_id,))


def command_of(connection: sqlite3.Connection, job_id: str) -> Command | None:
    return fetch_one(Command, connection, "SELECT * FROM commands WHERE job_id = ?", (job_id,))


def position_beside(
    connection: sqlite3.Connection, job_id: str, anchor: Experiment | Command, *, is_ahead: bool
) -> float:
    """Return a queue position for ``job_id`` directly before or after job ``anchor``.

    If ``is_ahead``, the position is before ``anchor``, else after it. Jobs of other priorities are ignored.
    """
    own: float = anchor.queue_position
    side, edge = ("<", "MAX") if is_ahead else (">", "MIN")
    neighbour = fetch_value(
        float,
        connection,
        f"SELECT {edge}(queue_position) FROM "  # noqa: S608 - one of two words of ours
        "(SELECT job_id, priority, queue_position FROM experiments "
        "UNION ALL SELECT job_id, priority, queue_position FROM commands WHERE end_us IS NULL) "
        f"WHERE priority = ? AND job_id NOT IN (?, ?) AND queue_position {side} ?",
        (anchor.priority, job_id, anchor.job_id, own),
    )
    if neighbour is None:
        return own - 1 if is_ahead else own + 1
    return (own + neighbour) / 2


def move_command(tx: Transaction, task_id: str, position: float) -> None:
    tx.update("commands", task_id, {"queue_position": position}, key="task_id")


def move_experiment(
    tx: Transaction, experiment: Experiment, position: float, priority: int | None, weight: float | None
) -> None:
    """Set an experiment's queue position and, unless None, its priority and weight."""
    config = json.loads(experiment.config)
    given = {"priority": priority, "weight": weight}
    changes = {name: value for name, value in given.items() if value is not None}
    config["resources"] = {**(config.get("resources") or {}), **changes}
    tx.update("experiments", experiment.id, {**changes, "queue_position": position, "config": config})
    tx.publish("scheduler", f"experiment:{experiment.id}")


_WAITING = """
SELECT t.id, t.experiment_id, t.run_id, t.task_id, t.is_node_excluded, e.slots_per_trial, e.max_slots, e.priority,
    e.queue_position, CASE WHEN t.run_id > 0 AND json_valid(e.config) THEN json_extract(e.config, '$.data.dstrial') END AS section
FROM trials t JOIN experiments e ON e.id = t.experiment_id
WHERE t.state = 'ACTIVE' AND e.state = 'ACTIVE' AND e.unmanaged = 0
    AND NOT EXISTS (SELECT 1 FROM allocations WHERE trial_id = t.id AND state != 'TERMINATED')
ORDER BY e.priority, e.queue_position, t.id
"""


def waiting_trials(connection: sqlite3.Connection) -> list[WaitingTrial]:
    """Return the pending trials of active experiments, in queue order."""
    return fetch_all(WaitingTrial, connection, _WAITING)


_RESIZABLE = """
SELECT a.trial_id, a.experiment_id, a.slots, a.start_us, e.slots_per_trial, e.max_slots,
    CASE WHEN json_valid(e.config) THEN json_extract(e.config, '$.data.dstrial') END AS section
FROM allocations a JOIN trials t ON t.id = a.trial_id JOIN experiments e ON e.id = a.experiment_id
WHERE a.state = 'RUNNING' AND a.is_ready AND a.preempt_us IS NULL AND a.kill_us IS NULL
    AND t.state = 'ACTIVE' AND e.state = 'ACTIVE' AND e.unmanaged = 0 AND json_array_length(a.slots) > 0
ORDER BY e.priority, e.queue_position, a.trial_id
"""


@dataclasses.dataclass(frozen=True, slots=True)
class ResizableTrial:
    """A running trial that the scheduler may preempt to change its slot count."""

    trial_id: int
    experiment_id: int
    slots: str  # JSON list of slot ids
    start_us: int
    slots_per_trial: int
    max_slots: int | None  # limit of the whole experiment; None: unlimited
    section: str | None  # ``data.dstrial`` of the config as JSON


def resizable_trials(connection: sqlite3.Connection) -> list[ResizableTrial]:
    """Return the running trials that may be preempted for a resize, in queue order."""
    return fetch_all(ResizableTrial, connection, _RESIZABLE)


def slots_of_run_before(connection: sqlite3.Connection, trial_id: int, run_id: int) -> int:
    """Return the slot count of a trial's last run before ``run_id``; 0 if none."""
    sql = "SELECT json_array_length(slots) FROM allocations WHERE trial_id = ? AND run_id < ? ORDER BY run_id DESC LIMIT 1"
    return fetch_value(int, connection, sql, (trial_id, run_id)) or 0


def unusable_counts(connection: sqlite3.Connection, trial_id: int) -> frozenset[int]:
    """Return the slot counts on which a trial can only fail with ``ConfigError``.

    A run with such a count has raised ``ConfigError``, and no run with this count has trained. For example, the batch size in
    the trial's code does not fit the slot count. If no run of the trial has trained, the result is empty.
    """
    sql = (
        "SELECT json_array_length(slots) AS count FROM allocations WHERE trial_id = :trial_id GROUP BY count "
        "HAVING SUM(num_reports) = 0 AND SUM(exit_reason LIKE '%ConfigError: %') > 0 "
        "AND (SELECT SUM(num_reports) FROM allocations WHERE trial_id = :trial_id) > 0"
    )
    return frozenset(fetch_column(int, connection, sql, {"trial_id": trial_id}))


def disabled_slots(connection: sqlite3.Connection, slot_ids: Collection[int]) -> Mapping[int, bool]:
    """Return the disabled slots among ``slot_ids``: slot id -> whether it drains.

    A draining slot lets its running tasks finish. A disabled node disables all of its slots. The result also contains every
    disabled node; the key is the node's ``agent_key``, a negative number.
    """
    rows = connection.execute("SELECT slot_id, drain FROM disabled_slots").fetchall()
    off = {slot_id: bool(drain) for slot_id, drain in rows}
    found = {slot_id: drain for slot_id, drain in off.items() if slot_id in slot_ids or slot_id < 0}
    if min(off, default=0) < 0:
        nodes = {slot_id: agent_key(node_of(slot_id)) for slot_id in slot_ids}
        found |= {slot_id: off[node] for slot_id, node in nodes.items() if node in off}
    return found


def disable_slot(tx: Transaction, slot_id: int, *, drain: bool, reason: str) -> None:
    """Disable a slot, or a whole node if ``slot_id`` is its ``agent_key``.

    If ``drain``, running tasks may finish. Otherwise they are killed, with ``reason`` as the stored reason. Killed trials and
    pausable tasks are requeued.
    """
    tx.insert("disabled_slots", {"slot_id": slot_id, "drain": drain}, "INSERT OR REPLACE")
    if not drain:
        rows = tx.execute(
            "SELECT id, slots FROM allocations WHERE state != 'TERMINATED' AND kill_us IS NULL"
        ).fetchall()
        for row in rows:
            slots = json.loads(row["slots"])
            nodes = {agent_key(node_of(one)) for one in slots} or {agent_key(OWN_NODE)}
            if slot_id in slots or slot_id in nodes:
                tx.update("allocations", row["id"], {"kill_us": now_us(), "kill_reason": reason})
                tx.publish(f"allocation:{row['id']}")
    tx.publish("scheduler")


def enable_slot(tx: Transaction, slot_id: int) -> None:
    """Enable a slot, or a whole node if ``slot_id`` is its ``agent_key``."""
    tx.execute("DELETE FROM disabled_slots WHERE slot_id = ?", (slot_id,))
    tx.publish("scheduler")
