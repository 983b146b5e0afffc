"""Rows of experiments."""

from __future__ import annotations

import json
import sqlite3
import uuid
from collections.abc import Mapping
from typing import Any

from dstrial.config.submission import Submission
from dstrial.master.clock import now_us
from dstrial.master.store.database import Transaction
from dstrial.master.store.errors import Hint, NotFoundError


def get(connection: sqlite3.Connection, experiment_id: int) -> sqlite3.Row | None:
    """Return an experiment's row, None if it does not exist."""
    row: sqlite3.Row | None = connection.execute(
        "SELECT * FROM experiments WHERE id = ?", (experiment_id,)
    ).fetchone()
    return row


def require(connection: sqlite3.Connection, experiment_id: int) -> sqlite3.Row:
    """Return an experiment's row.

    Raises:
        NotFoundError: there is none.
    """
    row = get(connection, experiment_id)
    if row is None:
        raise NotFoundError(f"experiment {experiment_id} is not found", Hint.LIST_EXPERIMENTS)
    return row


def by_external_id(connection: sqlite3.Connection, external_id: str) -> sqlite3.Row | None:
    """Return the experiment that detached runs know by this id."""
    row: sqlite3.Row | None = connection.execute(
        "SELECT * FROM experiments WHERE external_id = ?", (external_id,)
    ).fetchone()
    return row


def require_of_project(connection: sqlite3.Connection, experiment_id: int, project_id: int) -> sqlite3.Row:
    """Return an experiment's row.

    Raises:
        NotFoundError: there is none, or it is in another project.
    """
    row = require(connection, experiment_id)
    if row["project_id"] != project_id:
        raise NotFoundError(
            f"experiment {experiment_id} is in project {row['project_id']}; expected one of project {project_id}. "
            "Ask in its own project.",
        )
    return row


def of_project(connection: sqlite3.Connection, project_id: int) -> list[sqlite3.Row]:
    """Return all experiments of a project, oldest first."""
    return connection.execute(
        "SELECT * FROM experiments WHERE project_id = ? ORDER BY id", (project_id,)
    ).fetchall()


def insert(
    tx: Transaction,
    *,
    submission: Submission,
    owner_id: int,
    state: str,
    parent_id: int | None,
    project_id: int,
) -> int:
    """Store a new experiment and return its id."""
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
    """Give an experiment another config; its searcher stays of the same type, and what was submitted is kept.

    Columns that a person may have set beside the config follow it only where the config changes.
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
    before, after = _columns(json.loads(row["config"])), _columns(config)
    for name, value in after.items():
        if value != before[name]:
            tx.execute(f"UPDATE experiments SET {name} = ? WHERE id = ?", (value, experiment_id))  # noqa: S608 - a name of _columns


def _columns(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns that a config and a person set."""
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
    """Return the model definition of an experiment, gzip tar; empty for none.

    Raises:
        NotFoundError: there is no such experiment.
    """
    require(connection, experiment_id)
    row = connection.execute(
        "SELECT tgz FROM model_definitions WHERE experiment_id = ?", (experiment_id,)
    ).fetchone()
    return b"" if row is None else bytes(row["tgz"])
