"""Rows of experiments."""

from __future__ import annotations

import dataclasses
import json
import sqlite3
import uuid
from collections.abc import Mapping
from typing import Any

from dstrial.config.experiment_config.submission import Submission
from dstrial.master.clock import now_us
from dstrial.master.store.database import Transaction, fetch_all, fetch_one
from dstrial.master.store.errors import Hint, NotFoundError


@dataclasses.dataclass(frozen=True, slots=True)
class Experiment:
    """A row of experiments; ``schema.sql`` documents the columns."""

    id: int
    job_id: str
    state: str
    config: str
    original_config: str
    name: str
    description: str
    notes: str
    labels: str
    owner_id: int
    archived: bool
    parent_id: int | None
    unmanaged: bool
    searcher_type: str
    searcher_metric: str
    smaller_is_better: bool
    priority: int
    weight: float
    max_slots: int | None
    slots_per_trial: int
    queue_position: float
    progress: float
    num_trials: int
    checkpoint_count: int
    checkpoint_size: int
    searcher_snapshot: str | None
    start_us: int
    end_us: int | None
    end_reason: str | None
    log_retention_days: int | None
    best_trial_id: int | None
    best_metric: float | None
    interpreter: str | None
    project_id: int
    template: str | None
    external_id: str | None


def get(connection: sqlite3.Connection, experiment_id: int) -> Experiment | None:
    return fetch_one(Experiment, connection, "SELECT * FROM experiments WHERE id = ?", (experiment_id,))


def has_any(connection: sqlite3.Connection) -> bool:
    return connection.execute("SELECT 1 FROM experiments LIMIT 1").fetchone() is not None


def require(connection: sqlite3.Connection, experiment_id: int) -> Experiment:
    row = get(connection, experiment_id)
    if row is None:
        raise NotFoundError(f"experiment {experiment_id} is not found", Hint.LIST_EXPERIMENTS)
    return row


def by_external_id(connection: sqlite3.Connection, external_id: str) -> Experiment | None:
    """Return the experiment with an external id, which detached runs set."""
    return fetch_one(
        Experiment, connection, "SELECT * FROM experiments WHERE external_id = ?", (external_id,)
    )


def of_project(connection: sqlite3.Connection, project_id: int) -> list[Experiment]:
    return fetch_all(
        Experiment, connection, "SELECT * FROM experiments WHERE project_id = ? ORDER BY id", (project_id,)
    )


def insert(
    tx: Transaction,
    *,
    submission: Submission,
    owner_id: int,
    state: str,
    parent_id: int | None,
    project_id: int,
) -> int:
    config = submission.config
    searcher, columns = config["searcher"], _columns(config)
    now = now_us()
    cursor = tx.execute(
        "INSERT INTO experiments (job_id, state, config, original_config, name, description, labels, owner_id, "
        "parent_id, searcher_type, searcher_metric, smaller_is_better, priority, weight, max_slots, slots_per_trial, "
        "queue_position, start_us, log_retention_days, interpreter, project_id, template) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            str(uuid.uuid4()),
            state,
            json.dumps(config),
            submission.original,
            columns["name"],
            columns["description"],
            columns["labels"],
            owner_id,
            parent_id,
            searcher["name"],
            searcher["metric"],
            searcher["smaller_is_better"],
            columns["priority"],
            columns["weight"],
            columns["max_slots"],
            config["resources"]["slots_per_trial"],
            float(now),
            now,
            columns["log_retention_days"],
            submission.interpreter,
            project_id,
            None if submission.template is None else json.dumps(submission.template),
        ),
    )
    return int(cursor.lastrowid or 0)


def replace_config(
    tx: Transaction, experiment_id: int, config: Mapping[str, Any], interpreter: str | None
) -> None:
    """Replace an experiment's config but not its searcher type or original config.

    Columns that users can also set separately are updated only if their config value changes.
    """
    row = require(tx.connection, experiment_id)
    tx.execute(
        "UPDATE experiments SET config = ?, searcher_metric = ?, smaller_is_better = ?, slots_per_trial = ?, "
        "interpreter = ? WHERE id = ?",
        (
            json.dumps(config),
            config["searcher"]["metric"],
            config["searcher"]["smaller_is_better"],
            config["resources"]["slots_per_trial"],
            interpreter,
            experiment_id,
        ),
    )
    before, after = _columns(json.loads(row.config)), _columns(config)
    for name, value in after.items():
        if value != before[name]:
            tx.execute(f"UPDATE experiments SET {name} = ? WHERE id = ?", (value, experiment_id))  # noqa: S608 - a name of _columns


def _columns(config: Mapping[str, Any]) -> dict[str, Any]:
    resources = config.get("resources") or {}
    return {
        "name": config.get("name"),
        "description": config.get("description") or "",
        "labels": json.dumps(sorted(config.get("labels") or [])),
        "priority": resources.get("priority") or 42,
        "weight": resources.get("weight") or 1,
        "max_slots": resources.get("max_slots"),
        "log_retention_days": (config.get("retention_policy") or {}).get("log_retention_days"),
    }


def model_definition(connection: sqlite3.Connection, experiment_id: int) -> bytes:
    """Return an experiment's model definition, tar.gz; empty for none."""
    require(connection, experiment_id)
    row = connection.execute(
        "SELECT tgz FROM model_definitions WHERE experiment_id = ?", (experiment_id,)
    ).fetchone()
    return b"" if row is None else bytes(row["tgz"])


def detached_without_trial(connection: sqlite3.Connection, before_us: int) -> list[int]:
    """Return active detached experiments, older than a time, that have no trial."""
    rows = connection.execute(
        "SELECT id FROM experiments WHERE state = 'ACTIVE' AND unmanaged = 1 AND start_us < ? "
        "AND NOT EXISTS (SELECT 1 FROM trials WHERE experiment_id = experiments.id)",
        (before_us,),
    )
    return [int(row["id"]) for row in rows]


def update(tx: Transaction, experiment_id: int, **columns: Any) -> None:
    tx.update("experiments", experiment_id, columns)


def add_model_definition(tx: Transaction, experiment_id: int, tgz: bytes) -> None:
    tx.execute("INSERT INTO model_definitions (experiment_id, tgz) VALUES (?, ?)", (experiment_id, tgz))


def forget(tx: Transaction, experiment_id: int) -> None:
    """Delete an experiment and all of its rows."""
    of_trials = "trial_id IN (SELECT id FROM trials WHERE experiment_id = ?)"
    for part in ("steps >= 0", "steps < 0"):  # one partial index each
        tx.execute(f"DELETE FROM metrics WHERE {part} AND {of_trials}", (experiment_id,))  # noqa: S608 - constants
    tx.execute(f"DELETE FROM logs WHERE {of_trials}", (experiment_id,))  # noqa: S608 - a constant
    tx.execute(f"DELETE FROM log_sizes WHERE {of_trials}", (experiment_id,))  # noqa: S608 - a constant
    for table in ("checkpoints", "allocations", "tasks", "trials"):
        tx.execute(f"DELETE FROM {table} WHERE experiment_id = ?", (experiment_id,))  # noqa: S608 - constants
    tx.execute("DELETE FROM experiments WHERE id = ?", (experiment_id,))
    tx.publish(f"experiment:{experiment_id}")


def average_progress(tx: Transaction, experiment_id: int) -> None:
    """Set an experiment's progress to the average of its trials."""
    tx.execute(
        "UPDATE experiments SET progress = (SELECT AVG(progress) FROM trials WHERE experiment_id = ?) WHERE id = ?",
        (experiment_id, experiment_id),
    )
