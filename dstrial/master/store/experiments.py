"""Queries on experiments and their model definitions."""

from __future__ import annotations

import dataclasses
import json
import sqlite3
import uuid
from collections.abc import Mapping
from typing import Any

from dstrial.config.experiment_config.submission import Submission
from dstrial.master.clock import now_us
from dstrial.master.store.database import Transaction, exists, fetch_all, fetch_column, fetch_one, fetch_value
from dstrial.master.store.errors import Hint, required


@dataclasses.dataclass(frozen=True, slots=True)
class Experiment:
    """A row of table ``experiments``, documented in ``schema.sql``."""

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
    return exists(connection, "SELECT 1 FROM experiments LIMIT 1")


def require(connection: sqlite3.Connection, experiment_id: int) -> Experiment:
    return required(get(connection, experiment_id), f"experiment {experiment_id}", Hint.LIST_EXPERIMENTS)


def by_external_id(connection: sqlite3.Connection, external_id: str) -> Experiment | None:
    """Return the experiment with an external id (chosen by a script), or None."""
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
    config, now = submission.config, now_us()
    columns = {
        **_columns(config),
        **_fixed_columns(config),
        "job_id": str(uuid.uuid4()),
        "state": state,
        "original_config": submission.original,
        "owner_id": owner_id,
        "parent_id": parent_id,
        "searcher_type": config["searcher"]["name"],
        "queue_position": float(now),
        "start_us": now,
        "interpreter": submission.interpreter,
        "project_id": project_id,
        "template": submission.template,
    }
    return tx.insert("experiments", columns)


def replace_config(
    tx: Transaction, experiment_id: int, config: Mapping[str, Any], interpreter: str | None
) -> None:
    """Store a new config of an experiment, and update the columns derived from it.

    The searcher type and the originally submitted config do not change. Some columns, such as the priority, can also be
    changed by other requests. Such a column changes only if its value differs between the old and the new config.
    ``interpreter`` is the Python of the trials; None means the Python of the master.
    """
    before = _columns(json.loads(require(tx.connection, experiment_id).config))
    changed = {name: value for name, value in _columns(config).items() if value != before[name]}
    update(tx, experiment_id, **_fixed_columns(config), interpreter=interpreter, **changed)


def _fixed_columns(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return column -> value of the settings that change only with the config."""
    return {
        "config": config,
        "searcher_metric": config["searcher"]["metric"],
        "smaller_is_better": config["searcher"]["smaller_is_better"],
        "slots_per_trial": config["resources"]["slots_per_trial"],
    }


def _columns(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return column -> value of the settings that users can change without a config."""
    resources = config.get("resources") or {}
    return {
        "name": config.get("name"),
        "description": config.get("description") or "",
        "labels": sorted(config.get("labels") or []),
        "priority": resources.get("priority") or 42,
        "weight": resources.get("weight") or 1,
        "max_slots": resources.get("max_slots"),
        "log_retention_days": (config.get("retention_policy") or {}).get("log_retention_days"),
    }


def model_definition(connection: sqlite3.Connection, experiment_id: int) -> bytes:
    """Return an experiment's model definition as tar.gz; empty if it has none."""
    require(connection, experiment_id)
    sql = "SELECT tgz FROM model_definitions WHERE experiment_id = ?"
    return fetch_value(bytes, connection, sql, (experiment_id,)) or b""


def detached_without_trial(connection: sqlite3.Connection, before_us: int) -> list[int]:
    """Return the ids of active unmanaged experiments that have no trial yet.

    A script, not the master, creates the trials of an unmanaged experiment. Only experiments that started before ``before_us``
    (microseconds since the epoch) are returned.
    """
    return fetch_column(
        int,
        connection,
        "SELECT id FROM experiments WHERE state = 'ACTIVE' AND unmanaged = 1 AND start_us < ? "
        "AND NOT EXISTS (SELECT 1 FROM trials WHERE experiment_id = experiments.id)",
        (before_us,),
    )


def update(tx: Transaction, experiment_id: int, **columns: Any) -> None:
    tx.update("experiments", experiment_id, columns)


def add_model_definition(tx: Transaction, experiment_id: int, tgz: bytes) -> None:
    tx.insert("model_definitions", {"experiment_id": experiment_id, "tgz": tgz})


def forget(tx: Transaction, experiment_id: int) -> None:
    """Delete an experiment and all of its rows."""
    of_trials = "trial_id IN (SELECT id FROM trials WHERE experiment_id = ?)"
    # Metrics have one partial index for each sign of ``steps``.
    for part in (
        "metrics WHERE steps >= 0 AND",
        "metrics WHERE steps < 0 AND",
        "logs WHERE",
        "log_sizes WHERE",
    ):
        tx.execute(f"DELETE FROM {part} {of_trials}", (experiment_id,))  # noqa: S608 - constants
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
