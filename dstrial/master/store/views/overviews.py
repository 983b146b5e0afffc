"""Compact rows for the web page, read in one query each."""

from __future__ import annotations

import dataclasses
import json
import sqlite3
from collections.abc import Sequence

from dstrial.master.store.allocations import Allocation
from dstrial.master.store.database import fetch_all, fetch_one

_ADVANCE = """
CASE WHEN {unmanaged} THEN CASE WHEN {has_run} THEN 2 END
    ELSE (SELECT MAX(CASE WHEN a.state = 'RUNNING' THEN 2 ELSE 1 END) FROM allocations a WHERE {own}) END AS advance"""
_EXPERIMENT_ADVANCE = _ADVANCE.format(
    unmanaged="e.unmanaged",
    has_run="EXISTS (SELECT 1 FROM trials t WHERE t.experiment_id = e.id AND t.state = 'ACTIVE' AND t.run_id > 0)",
    own="a.state IN ('ASSIGNED', 'RUNNING') AND a.experiment_id = e.id",
)
_TRIAL_ADVANCE = _ADVANCE.format(
    unmanaged="e.unmanaged", has_run="t.run_id > 0", own="a.trial_id = t.id AND a.state != 'TERMINATED'"
)
_EXPERIMENTS = f"""
SELECT e.id, e.name, e.description, e.state, u.username, e.labels, p.id AS project_id, p.name AS project_name,
    w.name AS workspace_name, e.searcher_type, e.searcher_metric, e.smaller_is_better, e.best_trial_id, e.best_metric,
    e.progress, e.slots_per_trial, e.start_us, e.end_us, e.end_reason, e.archived, e.parent_id, e.unmanaged, e.priority,
    json_extract(e.config, '$.hyperparameters') AS hyperparameters,
    e.num_trials, e.checkpoint_size,
    {_EXPERIMENT_ADVANCE}
FROM experiments e JOIN users u ON u.id = e.owner_id
JOIN projects p ON p.id = e.project_id JOIN workspaces w ON w.id = p.workspace_id
"""  # noqa: S608 - a constant
_TRIALS = f"""
SELECT t.id, t.experiment_id, t.state, t.hparams, t.progress, t.total_batches, t.restarts, t.run_id, t.start_us, t.end_us,
    t.searcher_metric_value AS best, b.steps AS best_steps, l.steps AS latest_steps,
    (SELECT j.value FROM json_each(l.metrics) j WHERE j.key = e.searcher_metric) AS latest,
    t.checkpoint_count, t.checkpoint_size, t.best_checkpoint_uuid, t.is_stopped_by_searcher, t.early_exit, t.warm_start_uuid,
    (SELECT a.slots FROM allocations a WHERE a.trial_id = t.id ORDER BY a.run_id DESC LIMIT 1) AS slots,
    {_TRIAL_ADVANCE}
FROM trials t JOIN experiments e ON e.id = t.experiment_id
LEFT JOIN metrics b ON b.id = t.best_validation_id
LEFT JOIN metrics l ON l.id = t.latest_validation_id
"""  # noqa: S608 - a constant
MAX_METRICS = 2000  # metric names per response
MAX_CHECKPOINTS = 5000  # per experiment, newest first


@dataclasses.dataclass(frozen=True, slots=True)
class ExperimentOverview:
    id: int
    name: str
    description: str
    state: str
    username: str
    labels: str
    project_id: int
    project_name: str
    workspace_name: str
    searcher_type: str
    searcher_metric: str
    smaller_is_better: bool
    best_trial_id: int | None
    best_metric: float | None
    progress: float
    slots_per_trial: int
    start_us: int
    end_us: int | None
    end_reason: str | None
    archived: bool
    parent_id: int | None
    unmanaged: bool
    priority: int
    hyperparameters: str | None  # from the config, JSON
    num_trials: int
    checkpoint_size: int
    advance: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class TrialOverview:
    id: int
    experiment_id: int
    state: str
    hparams: str
    progress: float
    total_batches: int
    restarts: int
    run_id: int
    start_us: int
    end_us: int | None
    best: float | None
    best_steps: int | None
    latest_steps: int | None
    latest: float | str | None
    checkpoint_count: int
    checkpoint_size: int
    best_checkpoint_uuid: str | None
    is_stopped_by_searcher: bool
    early_exit: str | None
    warm_start_uuid: str | None
    slots: str | None  # current or last ones
    advance: int | None


def experiments(connection: sqlite3.Connection, ids: Sequence[int] = ()) -> list[ExperimentOverview]:
    """Return all or the given experiments, newest first."""
    where = "WHERE e.id IN (SELECT value FROM json_each(?))" if ids else ""
    return fetch_all(
        ExperimentOverview,
        connection,
        f"{_EXPERIMENTS} {where} ORDER BY e.id DESC",
        (json.dumps(list(ids)),) if ids else (),
    )


def experiment_of_trial(connection: sqlite3.Connection, trial_id: int) -> int | None:
    row = connection.execute("SELECT experiment_id FROM trials WHERE id = ?", (trial_id,)).fetchone()
    return None if row is None else int(row["experiment_id"])


def trials(
    connection: sqlite3.Connection, experiment_id: int, ids: Sequence[int] = ()
) -> list[TrialOverview]:
    some = "AND t.id IN (SELECT value FROM json_each(?))" if ids else ""
    return fetch_all(
        TrialOverview,
        connection,
        f"{_TRIALS} WHERE t.experiment_id = ? {some} ORDER BY t.id",
        (experiment_id, json.dumps(list(ids))) if ids else (experiment_id,),
    )


def some_trials(connection: sqlite3.Connection, ids: Sequence[int]) -> list[TrialOverview]:
    """Return the trials with the given ids, by id; unknown ids are skipped."""
    return fetch_all(
        TrialOverview,
        connection,
        f"{_TRIALS} WHERE t.id IN (SELECT value FROM json_each(?)) ORDER BY t.id",  # noqa: S608 - constants
        (json.dumps(list(ids)),),
    )


def records_per_epoch(connection: sqlite3.Connection, experiment_id: int) -> int | None:
    """Return the records per epoch of an experiment's config, if set."""
    row = connection.execute(
        "SELECT json_extract(config, '$.records_per_epoch') AS number FROM experiments WHERE id = ?",
        (experiment_id,),
    ).fetchone()
    return None if row is None or not row["number"] else int(row["number"])


def trial(connection: sqlite3.Connection, trial_id: int) -> TrialOverview | None:
    return fetch_one(TrialOverview, connection, f"{_TRIALS} WHERE t.id = ?", (trial_id,))


def metric_names(
    connection: sqlite3.Connection,
    experiment_id: int | None = None,
    trial_ids: Sequence[int] = (),
    text: str = "",
) -> list[tuple[str, str]]:
    """Return (group, name) of numeric metrics, at most ``MAX_METRICS`` + 1.

    ``text`` filters by a substring of ``group.name``, case-insensitive.
    """
    where = "t.experiment_id = ?" if experiment_id is not None else "t.id IN (SELECT value FROM json_each(?))"
    values: list[object] = [experiment_id if experiment_id is not None else json.dumps(list(trial_ids))]
    if text:
        where += " AND instr(lower(s.group_name || '.' || s.name), lower(?)) > 0"
        values.append(text)
    rows = connection.execute(
        "SELECT DISTINCT s.group_name, s.name FROM trials t CROSS JOIN metric_summaries s ON s.trial_id = t.id "  # noqa: S608 - constants
        f"WHERE {where} AND json_extract(s.summary, '$.type') = 'number' ORDER BY s.group_name, s.name LIMIT ?",
        (*values, MAX_METRICS + 1),
    )
    return [(str(row["group_name"]), str(row["name"])) for row in rows]


def runs(connection: sqlite3.Connection, trial_id: int) -> list[Allocation]:
    return fetch_all(
        Allocation, connection, "SELECT * FROM allocations WHERE trial_id = ? ORDER BY run_id", (trial_id,)
    )


@dataclasses.dataclass(frozen=True, slots=True)
class CheckpointOverview:
    uuid: str
    trial_id: int
    steps: int  # batches completed
    state: str
    size: int
    report_us: int
    is_being_deleted: bool
    manifest_sha256: str | None  # as reported by the trial
    num_files: int
    format: str | None  # from the metadata
    engines: str | None  # from the metadata, JSON
    metric: float | str | None  # searcher metric; a string if not finite
    models: str  # JSON list of [name, version]


def checkpoints(connection: sqlite3.Connection, experiment_id: int) -> list[CheckpointOverview]:
    """Return checkpoints, newest first, at most ``MAX_CHECKPOINTS`` + 1."""
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
    """Location and file list of a checkpoint, as stored in its row."""

    uuid: str
    state: str
    resources: str  # JSON, path -> bytes
    manifest_sha256: str | None
    config: str  # the experiment's, JSON, with ``checkpoint_storage``


def stored_files(connection: sqlite3.Connection, uuid: str) -> StoredFiles | None:
    return fetch_one(
        StoredFiles,
        connection,
        "SELECT c.uuid, c.state, c.resources, c.manifest_sha256, e.config "
        "FROM checkpoints c JOIN experiments e ON e.id = c.experiment_id WHERE c.uuid = ?",
        (uuid,),
    )
