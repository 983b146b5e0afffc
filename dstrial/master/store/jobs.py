"""The queue: places of experiments and commands among those that wait for slots."""

from __future__ import annotations

import json
import sqlite3

from dstrial.master.store.database import Transaction

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


def queued_experiments(connection: sqlite3.Connection) -> list[sqlite3.Row]:
    """Return experiments that are active or still hold slots, the next one first."""
    return connection.execute(_QUEUE).fetchall()


def count_without_slots(connection: sqlite3.Connection) -> int:
    """Return how many experiments are active and hold no slots."""
    row = connection.execute(
        "SELECT COUNT(*) FROM experiments e WHERE state = 'ACTIVE' AND NOT EXISTS "
        "(SELECT 1 FROM allocations a WHERE a.experiment_id = e.id AND a.state != 'TERMINATED')"
    ).fetchone()
    return int(row[0])


def experiment_of(connection: sqlite3.Connection, job_id: str) -> sqlite3.Row | None:
    """Return the experiment that has this place in the queue."""
    row: sqlite3.Row | None = connection.execute(
        "SELECT * FROM experiments WHERE job_id = ?", (job_id,)
    ).fetchone()
    return row


def command_of(connection: sqlite3.Connection, job_id: str) -> sqlite3.Row | None:
    """Return the command that has this place in the queue."""
    row: sqlite3.Row | None = connection.execute(
        "SELECT * FROM commands WHERE job_id = ?", (job_id,)
    ).fetchone()
    return row


def position_beside(
    connection: sqlite3.Connection, job_id: str, anchor: sqlite3.Row, *, is_ahead: bool
) -> float:
    """Return a queue position right before or behind another job of the same priority.

    Args:
        connection: to read from.
        job_id: what is moved.
        anchor: the other one, an experiment or a command.
        is_ahead: whether it goes before that.
    """
    own: float = anchor["queue_position"]
    side, edge = ("<", "MAX") if is_ahead else (">", "MIN")
    neighbour = connection.execute(
        f"SELECT {edge}(queue_position) FROM "  # noqa: S608 - one of two words of ours
        "(SELECT job_id, priority, queue_position FROM experiments "
        "UNION ALL SELECT job_id, priority, queue_position FROM commands WHERE end_us IS NULL) "
        f"WHERE priority = ? AND job_id NOT IN (?, ?) AND queue_position {side} ?",
        (anchor["priority"], job_id, anchor["job_id"], own),
    ).fetchone()[0]
    if neighbour is None:
        return own - 1 if is_ahead else own + 1
    return float((own + neighbour) / 2)


def move_command(tx: Transaction, task_id: str, position: float) -> None:
    """Give a command another place within its priority."""
    tx.execute("UPDATE commands SET queue_position = ? WHERE task_id = ?", (position, task_id))


def move_experiment(
    tx: Transaction, experiment: sqlite3.Row, position: float, priority: int | None, weight: float | None
) -> None:
    """Give an experiment another place, and where they are given another priority and weight."""
    config = json.loads(experiment["config"])
    resources = dict(config.get("resources") or {})
    for name, value in (("priority", priority), ("weight", weight)):
        if value is not None:
            resources[name] = value
    tx.execute(
        "UPDATE experiments SET priority = coalesce(?, priority), weight = coalesce(?, weight), queue_position = ?, "
        "config = ? WHERE id = ?",
        (priority, weight, position, json.dumps({**config, "resources": resources}), experiment["id"]),
    )
    tx.publish("scheduler", f"experiment:{experiment['id']}")
