"""Store rows and allocation requests with defaults for irrelevant fields."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

from dstrial.master.backends.backend import AllocationRequest
from dstrial.master.store.database import Transaction

DEFAULTS: dict[str, dict[str, Any]] = {
    "experiments": {
        "state": "COMPLETED", "config": {}, "original_config": "", "name": "x", "owner_id": 1, "searcher_type": "single",
        "searcher_metric": "loss", "smaller_is_better": True, "slots_per_trial": 1, "queue_position": 1.0, "start_us": 0,
    },
    "trials": {"state": "COMPLETED", "hparams": {}, "seed": 1, "task_id": "t", "start_us": 0},
    "tasks": {"type": "TRIAL", "start_us": 0},
    "allocations": {
        "run_id": 1, "trial_id": 0, "experiment_id": 0, "state": "RUNNING", "slots": [], "ports": {}, "resources_id": "r",
        "directory": "/nonexistent", "start_us": 0,
    },
    "checkpoints": {
        "task_id": "t", "run_id": 1, "state": "COMPLETED", "steps": 1, "resources": {}, "metadata": {}, "size": 0,
        "report_us": 0,
    },
    "commands": {
        "kind": "COMMAND", "state": "ACTIVE", "description": "", "config": {}, "owner_id": 1, "workspace_id": 1,
        "num_slots": 0, "queue_position": 1.0, "run_id": 1, "start_us": 0,
    },
    "metrics": {"run_id": 1, "group_name": "validation", "end_us": 1},
    "logs": {"time_us": 0, "source": "task"},
    "users": {"modified_us": 0},
}  # fmt: skip
_UNIQUE = {"experiments": "job_id", "trials": "request_id", "commands": "job_id"}


def add(tx: Transaction, table: str, **columns: Any) -> int:
    """Insert a row with a unique job or request id; return the row's id."""
    own = {_UNIQUE[table]: str(uuid.uuid4())} if table in _UNIQUE else {}
    return tx.insert(table, {**DEFAULTS.get(table, {}), **own, **columns})


def allocation_request(directory: Path, **changes: Any) -> AllocationRequest:
    """Return the request to start a trial's allocation in a directory."""
    fields: dict[str, Any] = {
        "allocation_id": "1.x.1", "task_id": "1.x", "trial_id": 1, "experiment_id": 1, "run_id": 1, "directory": directory,
        "slots": (), "ports": {}, "config": {}, "hparams": {}, "trial_seed": 1, "steps_completed": 0, "latest_checkpoint": None,
        "session_token": "session", "user_token": "user", "username": "determined", "master_url": "http://127.0.0.1:1",
        "cluster_id": "c", "master_id": "m", "agent_id": "a", "resources_id": "r", "model_definition": b"", "entrypoint": "true",
    }  # fmt: skip
    return AllocationRequest(**{**fields, **changes})


def value(tx: Transaction, sql: str, *parameters: Any) -> Any:
    """Return the first column of the first row of a query."""
    return tx.execute(sql, parameters).fetchone()[0]
