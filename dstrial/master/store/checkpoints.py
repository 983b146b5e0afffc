"""Queries on checkpoints; their files are in the experiment's checkpoint storage."""

from __future__ import annotations

import dataclasses
import json
import re
import sqlite3
from collections.abc import Mapping
from typing import Any

from dstrial.checkpoint.manifest import MANIFEST_DIGEST
from dstrial.master.clock import now_us
from dstrial.master.store.database import (
    Conditions,
    Transaction,
    exists,
    fetch_all,
    fetch_column,
    fetch_one,
    fetch_value,
)
from dstrial.master.store.errors import ConflictError, Hint, InvalidError, required
from dstrial.master.store.trials import Trial

_SHA256 = re.compile("[0-9a-f]{64}")

_SELECT = (
    "SELECT checkpoints.*, trials.hparams AS trial_hparams, experiments.config AS experiment_config, "
    "experiments.searcher_metric, experiments.smaller_is_better, "
    "(SELECT metrics.metrics FROM metrics WHERE metrics.trial_id = checkpoints.trial_id "
    "AND metrics.group_name = 'validation' AND metrics.steps = checkpoints.steps AND metrics.steps >= 0 AND metrics.archived = 0 "
    "ORDER BY metrics.run_id DESC LIMIT 1) AS validation "
    "FROM checkpoints JOIN trials ON trials.id = checkpoints.trial_id "
    "JOIN experiments ON experiments.id = checkpoints.experiment_id"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Checkpoint:
    """A row of table ``checkpoints``, documented in ``schema.sql``."""

    uuid: str
    experiment_id: int
    trial_id: int
    task_id: str
    allocation_id: str | None
    run_id: int
    state: str
    steps: int
    resources: str
    metadata: str
    size: int
    report_us: int
    deleting_us: int | None
    manifest_sha256: str | None


@dataclasses.dataclass(frozen=True, slots=True)
class CheckpointInfo(Checkpoint):
    trial_hparams: str
    experiment_config: str
    searcher_metric: str
    smaller_is_better: bool
    validation: str | None


def add_checkpoint(
    tx: Transaction,
    *,
    uuid: str,
    trial: Trial,
    resources: Mapping[str, int],
    metadata: Mapping[str, Any],
    **others: Any,
) -> None:
    """Insert a checkpoint, or update it from a repeated report.

    ``resources`` maps path -> bytes. ``others`` are further columns. Once the SHA-256 of the manifest is stored, later reports
    cannot change it, because the files are verified by it.

    Raises:
        ConflictError: the uuid belongs to a checkpoint of another trial.
    """
    known = tx.execute("SELECT trial_id, manifest_sha256 FROM checkpoints WHERE uuid = ?", (uuid,)).fetchone()
    if known is not None and known["trial_id"] != trial.id:
        raise ConflictError(
            f"checkpoint {uuid} belongs to trial {known['trial_id']}; expected a uuid that is not in use."
        )
    digest = None if known is None else known["manifest_sha256"]
    reported = metadata.get(MANIFEST_DIGEST)
    if digest is None and isinstance(reported, str) and _SHA256.fullmatch(reported) is not None:
        digest = reported
    metadata = _with_digest(metadata, digest)
    columns = {
        **others,
        "uuid": uuid,
        "experiment_id": trial.experiment_id,
        "trial_id": trial.id,
        "task_id": trial.task_id,
        "run_id": trial.run_id,
        "steps": int(metadata.get("steps_completed") or 0),
        "resources": resources,
        "metadata": metadata,
        "size": sum(resources.values()),
        "manifest_sha256": digest,
    }
    tx.insert("checkpoints", columns, "INSERT OR REPLACE")
    _update_counts(tx, trial.id)


def _with_digest(metadata: Mapping[str, Any], digest: str | None) -> dict[str, Any]:
    rest = {key: value for key, value in metadata.items() if key != MANIFEST_DIGEST}
    return rest if digest is None else {**rest, MANIFEST_DIGEST: digest}


def _update_counts(tx: Transaction, trial_id: int) -> None:
    row = tx.execute(
        "SELECT COUNT(*) AS number, COALESCE(SUM(size), 0) AS size FROM checkpoints "
        "WHERE trial_id = ? AND state IN ('COMPLETED', 'PARTIALLY_DELETED')",
        (trial_id,),
    ).fetchone()
    tx.update("trials", trial_id, {"checkpoint_count": row["number"], "checkpoint_size": row["size"]})
    update_best(tx, trial_id)


def update_best(tx: Transaction, trial_id: int) -> None:
    """Store which checkpoint of a trial is at the batch of its best validation.

    Only COMPLETED checkpoints count, and of several the newest. Without one, the trial has no best checkpoint.
    """
    tx.execute(
        "UPDATE trials SET best_checkpoint_uuid = (SELECT uuid FROM checkpoints JOIN metrics "
        "ON metrics.id = trials.best_validation_id WHERE checkpoints.trial_id = trials.id "
        "AND checkpoints.state = 'COMPLETED' AND checkpoints.steps = metrics.steps "
        "ORDER BY report_us DESC LIMIT 1) WHERE id = ?",
        (trial_id,),
    )


def get_checkpoint(connection: sqlite3.Connection, uuid: str) -> CheckpointInfo | None:
    return fetch_one(CheckpointInfo, connection, f"{_SELECT} WHERE checkpoints.uuid = ?", (uuid,))


def require_checkpoint(connection: sqlite3.Connection, uuid: str) -> CheckpointInfo:
    return required(get_checkpoint(connection, uuid), f"checkpoint {uuid}", Hint.LIST_CHECKPOINTS)


def latest_completed(connection: sqlite3.Connection, trial_id: int) -> Checkpoint | None:
    """Return the trial's COMPLETED checkpoint with the most batches, newest on ties."""
    sql = (
        "SELECT * FROM checkpoints WHERE trial_id = ? AND state = 'COMPLETED' "
        "ORDER BY steps DESC, report_us DESC LIMIT 1"
    )
    return fetch_one(Checkpoint, connection, sql, (trial_id,))


def in_use(connection: sqlite3.Connection) -> dict[str, str]:
    """Return checkpoints that must not be deleted: uuid -> description of the use.

    As in Determined 0.38.1, these are warm-start checkpoints of trials and registered model versions.
    """
    warm = connection.execute("SELECT warm_start_uuid FROM trials WHERE warm_start_uuid IS NOT NULL")
    found = {row["warm_start_uuid"]: "what a trial starts from" for row in warm}
    rows = connection.execute(
        "SELECT v.checkpoint_uuid, m.name, v.version FROM model_versions v JOIN models m ON m.id = v.model_id"
    )
    found.update(
        {row["checkpoint_uuid"]: f"version {row['version']} of model {row['name']!r}" for row in rows}
    )
    return found


def claim(tx: Transaction, uuid: str) -> str | None:
    """Mark a checkpoint as being deleted, unless a trial or model version uses it.

    Returns a description of the use, or None if the checkpoint was marked.
    """
    used_as = in_use(tx.connection).get(uuid)
    if used_as is None:
        tx.update("checkpoints", uuid, {"deleting_us": now_us()}, key="uuid")
    return used_as


def release_claims(tx: Transaction, uuid: str | None = None) -> None:
    """Undo ``claim`` after a failed deletion, for all checkpoints if ``uuid`` is None."""
    tx.execute("UPDATE checkpoints SET deleting_us = NULL WHERE ? IS NULL OR uuid = ?", (uuid, uuid))


def refuse_deleting(connection: sqlite3.Connection, row: Checkpoint) -> None:
    """Raise ``InvalidError`` if a checkpoint is not COMPLETED or is being deleted."""
    state = row.state
    of_experiment = fetch_value(
        str, connection, "SELECT state FROM experiments WHERE id = ?", (row.experiment_id,)
    )
    if row.deleting_us is not None or of_experiment == "DELETING":
        state = "being deleted"
    if state != "COMPLETED":
        raise InvalidError(
            f"checkpoint {row.uuid} is {state}; expected a COMPLETED one, whose files are all there. Take another."
        )


def list_checkpoints(
    connection: sqlite3.Connection,
    *,
    trial_id: int | None = None,
    experiment_id: int | None = None,
    states: tuple[str, ...] = (),
) -> list[CheckpointInfo]:
    """Return the checkpoints of a trial or an experiment, oldest first.

    ``states`` limits the result to checkpoints in these states; empty means all.
    """
    column, value = ("trial_id", trial_id) if trial_id is not None else ("experiment_id", experiment_id)
    where = Conditions()
    where.need(f"checkpoints.{column} = ?", value)
    where.need_one_of("checkpoints.state", states)
    sql = f"{_SELECT} {where.sql} ORDER BY checkpoints.report_us"
    return fetch_all(CheckpointInfo, connection, sql, where.values)


def set_resources(tx: Transaction, uuid: str, resources: Mapping[str, int]) -> None:
    """Store a checkpoint's remaining files (path -> bytes), and update its state.

    If fewer files than before remain, the state is PARTIALLY_DELETED. If no file remains, the state is DELETED, and the stored
    file list is unchanged, as in Determined 0.38.1 (e2e_tests/tests/cluster/test_checkpoints.py).
    """
    row = require_checkpoint(tx.connection, uuid)
    before: dict[str, int] = json.loads(row.resources)
    if not [path for path in resources if not path.endswith("/")]:
        state, resources = "DELETED", before
    elif set(before) - set(resources):
        state = "PARTIALLY_DELETED"
    else:
        state = row.state
    columns = {"state": state, "resources": resources, "size": sum(resources.values()), "deleting_us": None}
    tx.update("checkpoints", uuid, columns, key="uuid")
    _update_counts(tx, row.trial_id)
    tx.publish(f"trial:{row.trial_id}", f"experiment:{row.experiment_id}")


def set_metadata(tx: Transaction, uuid: str, metadata: Mapping[str, Any]) -> None:
    """Replace a checkpoint's metadata except the SHA-256 of its manifest."""
    digest = require_checkpoint(tx.connection, uuid).manifest_sha256
    tx.update("checkpoints", uuid, {"metadata": _with_digest(metadata, digest)}, key="uuid")


def note_user(tx: Transaction, uuid: str, trial_id: int, kind: str) -> None:
    """Record that a trial uses a checkpoint.

    ``kind`` is TRIAL_SOURCE_INFO_TYPE_INFERENCE or TRIAL_SOURCE_INFO_TYPE_FINE_TUNING.
    """
    require_checkpoint(tx.connection, uuid)
    columns = {"checkpoint_uuid": uuid, "trial_id": trial_id, "type": kind}
    tx.insert("trial_sources", columns, "INSERT OR IGNORE")


def note_version_user(tx: Transaction, model_id: int, version: int, trial_id: int, kind: str) -> None:
    known = "SELECT 1 FROM model_versions WHERE model_id = ? AND version = ?"
    row = tx.execute(known, (model_id, version)).fetchone()
    required(row, f"version {version} of model {model_id}", Hint.LIST_VERSIONS)
    columns = {"model_id": model_id, "version": version, "trial_id": trial_id, "type": kind}
    tx.insert("trial_source_versions", columns, "INSERT OR IGNORE")


def users_of_version(
    connection: sqlite3.Connection, model_id: int, version: int, kind: str | None
) -> list[int]:
    sql = (
        "SELECT DISTINCT trial_id FROM trial_source_versions "
        "WHERE model_id = ? AND version = ? AND (? IS NULL OR type = ?)"
    )
    return fetch_column(int, connection, sql, (model_id, version, kind, kind))


def users_of(connection: sqlite3.Connection, uuid: str, kind: str | None) -> list[int]:
    """Return the ids of trials that use a checkpoint; ``kind`` None means any use."""
    sql = "SELECT DISTINCT trial_id FROM trial_sources WHERE checkpoint_uuid = ? AND (? IS NULL OR type = ?)"
    return fetch_column(int, connection, sql, (uuid, kind, kind))


def experiment_of(connection: sqlite3.Connection, uuid: str) -> int | None:
    return fetch_value(int, connection, "SELECT experiment_id FROM checkpoints WHERE uuid = ?", (uuid,))


def is_start_of(connection: sqlite3.Connection, uuid: str, trial_id: int, allocation_id: str) -> bool:
    """Return whether a trial or one of its allocations started from a checkpoint.

    The checkpoint is the warm start of the trial, or allocation ``allocation_id`` started from it.
    """
    sql = (
        "SELECT 1 FROM trials t LEFT JOIN allocations a ON a.id = ? "
        "WHERE t.id = ? AND (t.warm_start_uuid = ? OR a.checkpoint_uuid = ?)"
    )
    return exists(connection, sql, (allocation_id, trial_id, uuid, uuid))


def by_batch(connection: sqlite3.Connection, trial_id: int) -> list[Checkpoint]:
    """Return all checkpoints of a trial, in any state, ordered by batch."""
    sql = "SELECT * FROM checkpoints WHERE trial_id = ? ORDER BY steps, report_us"
    return fetch_all(Checkpoint, connection, sql, (trial_id,))


def unknown_of(connection: sqlite3.Connection, uuids: list[str]) -> list[str]:
    """Return those ``uuids`` under which no checkpoint was ever reported."""
    known = "SELECT 1 FROM checkpoints WHERE uuid = ?"
    return [uuid for uuid in uuids if not exists(connection, known, (uuid,))]


def is_known_storage(connection: sqlite3.Connection, path: str) -> bool:
    """Return whether ``remember_storage`` has recorded the storage at a path."""
    return exists(connection, "SELECT 1 FROM cluster WHERE key = ?", (f"storage:{path}",))


def remember_storage(tx: Transaction, path: str) -> None:
    """Record that the storage at a path has a marker file.

    If the file is missing later, the storage is unavailable, for example unmounted.
    """
    tx.insert("cluster", {"key": f"storage:{path}", "value": ""}, "INSERT OR IGNORE")
