"""Queries on trials, and the tasks that a new or reopened trial gets."""

from __future__ import annotations

import dataclasses
import sqlite3
import uuid
from collections.abc import Mapping
from typing import Any, Literal

from dstrial.master.clock import now_us
from dstrial.master.store.database import Transaction, fetch_all, fetch_column, fetch_value
from dstrial.master.store.errors import Hint, required
from dstrial.master.store.experiments import Experiment
from dstrial.search import Create

_TERMINAL = "('COMPLETED', 'CANCELED', 'ERROR')"


@dataclasses.dataclass(frozen=True, slots=True)
class Trial:
    """A row of table ``trials``, documented in ``schema.sql``."""

    id: int
    experiment_id: int
    request_id: str
    state: str
    hparams: str
    seed: int
    task_id: str
    run_id: int
    restarts: int
    progress: float
    total_batches: int
    runner_state: str
    start_us: int
    end_us: int | None
    searcher_metric_value: float | None
    best_validation_id: int | None
    latest_validation_id: int | None
    best_checkpoint_uuid: str | None
    checkpoint_count: int
    checkpoint_size: int
    warm_start_uuid: str | None
    metadata: str | None
    log_policy_matched: str | None
    early_exit: str | None
    is_stopped_by_searcher: bool
    is_closed: bool
    retry_cancelled: bool
    last_failure: str | None
    log_retention_days: int | None
    external_id: str | None
    heartbeat_us: int | None
    is_lost: bool
    is_node_excluded: int
    num_metric_names: int


def _where(connection: sqlite3.Connection, condition: str, *values: object) -> list[Trial]:
    return fetch_all(Trial, connection, f"SELECT * FROM trials WHERE {condition}", values)  # noqa: S608 - ours


def _one(connection: sqlite3.Connection, condition: str, *values: object) -> Trial | None:
    return next(iter(_where(connection, condition, *values)), None)


def get(connection: sqlite3.Connection, trial_id: int) -> Trial | None:
    return _one(connection, "id = ?", trial_id)


def require(connection: sqlite3.Connection, trial_id: int) -> Trial:
    return required(get(connection, trial_id), f"trial {trial_id}", Hint.LIST_TRIALS)


def by_request(connection: sqlite3.Connection, experiment_id: int, request_id: str) -> Trial | None:
    """Return the trial that the searcher requested with ``request_id``, or None."""
    return _one(connection, "experiment_id = ? AND request_id = ?", experiment_id, request_id)


def by_external_id(connection: sqlite3.Connection, experiment_id: int, external_id: str) -> Trial | None:
    """Return the trial with an external id (chosen by a script), or None."""
    return _one(connection, "experiment_id = ? AND external_id = ?", experiment_id, external_id)


def of_experiment(connection: sqlite3.Connection, experiment_id: int) -> list[Trial]:
    return _where(connection, "experiment_id = ? ORDER BY id", experiment_id)


def ids_of(connection: sqlite3.Connection, experiment_id: int) -> list[int]:
    return fetch_column(
        int, connection, "SELECT id FROM trials WHERE experiment_id = ? ORDER BY id", (experiment_id,)
    )


def open_ids(connection: sqlite3.Connection, experiment_id: int) -> list[int]:
    """Return the ids of an experiment's trials that have not ended, oldest first."""
    sql = f"SELECT id FROM trials WHERE experiment_id = ? AND state NOT IN {_TERMINAL} ORDER BY id"  # noqa: S608 - a constant
    return fetch_column(int, connection, sql, (experiment_id,))


def insert(tx: Transaction, experiment: Experiment, action: Create, now: int, warm_start: str | None) -> int:
    """Insert a trial that the searcher requests, and its task; return the trial's id.

    ``now`` is in microseconds. ``warm_start`` is the uuid of another trial's checkpoint, from which the new trial starts.
    """
    task_id = f"{experiment.id}.{action.request_id}"
    columns = {
        "experiment_id": experiment.id,
        "request_id": action.request_id,
        "state": "PAUSED" if experiment.state == "PAUSED" else "ACTIVE",
        "hparams": action.hparams,
        "seed": action.trial_seed,
        "task_id": task_id,
        "start_us": now,
        "warm_start_uuid": warm_start,
    }
    trial_id = tx.insert("trials", columns)
    _insert_task(tx, task_id, experiment.id, trial_id, now)
    tx.publish(f"trial:{trial_id}")
    return trial_id


def insert_detached(
    tx: Transaction, experiment_id: int, hparams: Mapping[str, Any], external_id: str | None, now: int
) -> int:
    """Insert a detached trial, which a script runs without the master; return its id.

    ``external_id`` is an id that the script chose, or None. ``now`` is in microseconds.
    """
    request_id = str(uuid.uuid4())
    task_id = f"{experiment_id}.{request_id}"
    columns = {
        "experiment_id": experiment_id,
        "request_id": request_id,
        "state": "ACTIVE",
        "hparams": hparams,
        "seed": 0,
        "task_id": task_id,
        "start_us": now,
        "external_id": external_id,
        "heartbeat_us": now,
    }
    trial_id = tx.insert("trials", columns)
    _insert_task(tx, task_id, experiment_id, trial_id, now)
    tx.publish(f"trial:{trial_id}", f"experiment:{experiment_id}")
    return trial_id


def reopen(tx: Transaction, trial: Trial) -> None:
    """Set an ended trial to ACTIVE with a new task, so that the trial can resume."""
    now = now_us()
    number = fetch_value(int, tx.connection, "SELECT COUNT(*) FROM tasks WHERE trial_id = ?", (trial.id,))
    task_id = f"{trial.experiment_id}.{trial.request_id}-{number}"
    tx.execute(
        "UPDATE trials SET state = 'ACTIVE', end_us = NULL, restarts = 0, progress = 0, is_closed = 0, task_id = ?, "
        "is_stopped_by_searcher = 0, retry_cancelled = 0, is_node_excluded = 0, last_failure = NULL, early_exit = NULL "
        "WHERE id = ?",
        (task_id, trial.id),
    )
    _insert_task(tx, task_id, trial.experiment_id, trial.id, now)
    tx.publish(f"trial:{trial.id}")


def _insert_task(tx: Transaction, task_id: str, experiment_id: int, trial_id: int, now: int) -> None:
    columns = {"id": task_id, "type": "TRIAL", "experiment_id": experiment_id, "trial_id": trial_id}
    tx.insert("tasks", {**columns, "start_us": now})


def of_task(connection: sqlite3.Connection, task_id: str) -> Trial | None:
    return _one(connection, "id = (SELECT trial_id FROM tasks WHERE id = ?)", task_id)


def keep_logs(tx: Transaction, trial_id: int, days: int) -> None:
    """Set how many days a trial's logs are kept; -1 means forever."""
    tx.execute("UPDATE trials SET log_retention_days = ? WHERE id = ?", (days, trial_id))


def silent_since(connection: sqlite3.Connection, before_us: int) -> list[Trial]:
    """Return active detached (unmanaged) trials with no heartbeat since ``before_us``."""
    return _where(connection, "state = 'ACTIVE' AND heartbeat_us < ? ORDER BY id", before_us)


def update(tx: Transaction, trial_id: int, **columns: Any) -> None:
    tx.update("trials", trial_id, columns)


def best_ids(connection: sqlite3.Connection, experiment: Experiment, limit: int) -> list[int]:
    """Return the ids of an experiment's ``limit`` best trials, best first."""
    order = "ASC" if experiment.smaller_is_better else "DESC"
    sql = (
        "SELECT id FROM trials WHERE experiment_id = ? "  # noqa: S608 - one of two words of ours
        f"ORDER BY searcher_metric_value IS NULL, searcher_metric_value {order}, id LIMIT ?"
    )
    return fetch_column(int, connection, sql, (experiment.id, limit))


def progress_by_request(connection: sqlite3.Connection, experiment_id: int) -> dict[str, float]:
    """Return searcher request id -> progress (0 to 1) of an experiment's trials."""
    rows = connection.execute(
        "SELECT request_id, progress FROM trials WHERE experiment_id = ?", (experiment_id,)
    )
    return {row["request_id"]: float(row["progress"]) for row in rows}


def activate_paused(tx: Transaction, experiment_id: int) -> None:
    tx.execute(
        "UPDATE trials SET state = 'ACTIVE' WHERE experiment_id = ? AND state = 'PAUSED'", (experiment_id,)
    )


def set_flag(tx: Transaction, trial_id: int, column: Literal["retry_cancelled", "is_node_excluded"]) -> bool:
    """Set a flag of a trial to 1, because a log policy matched; return True.

    If the flag was already set, change nothing and return False.
    """
    cursor = tx.execute(f"UPDATE trials SET {column} = 1 WHERE id = ? AND {column} = 0", (trial_id,))  # noqa: S608 - one of the two above
    return bool(cursor.rowcount)
