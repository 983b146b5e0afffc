"""Small rows of an experiment's checkpoints for the page, without configs and lists of files."""

from __future__ import annotations

import dataclasses
import sqlite3

from dstrial.master.store.database import fetch_all, fetch_one

MAX_CHECKPOINTS = 5000
"""How many checkpoints of an experiment are told of at most, the newest."""


@dataclasses.dataclass(frozen=True, slots=True)
class CheckpointOverview:
    uuid: str
    trial_id: int
    steps: int  # batches completed
    state: str
    size: int
    report_us: int
    is_being_deleted: bool
    manifest_sha256: str | None  # as its trial has reported it
    num_files: int
    format: str | None  # of its metadata
    engines: str | None  # of its metadata, JSON
    metric: float | str | None  # the searcher's; a word for NaN or infinity
    models: str  # JSON list of [name, version]


def checkpoints(connection: sqlite3.Connection, experiment_id: int) -> list[CheckpointOverview]:
    """Return an experiment's checkpoints, the newest first; ``MAX_CHECKPOINTS`` + 1 where there are more."""
    return fetch_all(
        CheckpointOverview,
        connection,
        "SELECT c.uuid, c.trial_id, c.steps, c.state, c.size, c.report_us, c.deleting_us IS NOT NULL AS is_being_deleted, "
        "c.manifest_sha256, (SELECT COUNT(*) FROM json_each(c.resources) r WHERE r.key NOT LIKE '%/') AS num_files, "
        "CASE WHEN json_valid(c.metadata) THEN json_extract(c.metadata, '$.format') END AS format, "
        "CASE WHEN json_valid(c.metadata) THEN json_extract(c.metadata, '$.engines') END AS engines, "
        "(SELECT j.value FROM metrics m CROSS JOIN json_each(m.metrics) j WHERE m.trial_id = c.trial_id "
        "AND m.group_name = 'validation' AND m.steps = c.steps AND m.steps >= 0 AND m.archived = 0 "
        "AND j.key = e.searcher_metric ORDER BY m.run_id DESC LIMIT 1) AS metric, "
        "(SELECT json_group_array(json_array(o.name, v.version)) FROM model_versions v JOIN models o ON o.id = v.model_id "
        "WHERE v.checkpoint_uuid = c.uuid) AS models "
        "FROM checkpoints c JOIN experiments e ON e.id = c.experiment_id WHERE c.experiment_id = ? "
        "ORDER BY c.report_us DESC, c.uuid LIMIT ?",
        (experiment_id, MAX_CHECKPOINTS + 1),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class StoredFiles:
    """What a checkpoint's row says of its files."""

    uuid: str
    state: str
    resources: str  # JSON, path -> bytes
    manifest_sha256: str | None
    config: str  # of its experiment, JSON; its ``checkpoint_storage`` says where the files lie


def stored_files(connection: sqlite3.Connection, uuid: str) -> StoredFiles | None:
    return fetch_one(
        StoredFiles,
        connection,
        "SELECT c.uuid, c.state, c.resources, c.manifest_sha256, e.config "
        "FROM checkpoints c JOIN experiments e ON e.id = c.experiment_id WHERE c.uuid = ?",
        (uuid,),
    )
