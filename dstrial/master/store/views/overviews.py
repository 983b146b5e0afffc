"""Queries for the web page; each returns dicts with the keys of the page's JSON."""

from __future__ import annotations

import dataclasses
import json
import sqlite3
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from dstrial.master.clock import format_us
from dstrial.master.store.allocations import Allocation
from dstrial.master.store.database import Conditions, Parameters, fetch_all, fetch_value
from dstrial.master.store.reports.metric_summaries import finite
from dstrial.master.store.views.listings import EXPERIMENT_ADVANCE, TRIAL_ADVANCE

Json: TypeAlias = dict[str, Any]

_STATE = """
CASE WHEN {row}.state != 'ACTIVE' THEN {row}.state
    ELSE CASE {advance} WHEN 2 THEN 'RUNNING' WHEN 1 THEN 'STARTING' ELSE 'QUEUED' END END AS state"""
_EXPERIMENTS = f"""
SELECT e.id, e.name, e.description, {_STATE.format(row="e", advance=EXPERIMENT_ADVANCE)}, u.username AS user, e.labels,
    p.id AS projectId, p.name AS project, w.name AS workspace, e.searcher_type AS searcher, e.searcher_metric AS metric,
    e.smaller_is_better AS smallerIsBetter, e.best_trial_id AS bestTrial, e.best_metric AS best, e.progress,
    e.slots_per_trial AS slots, e.start_us AS start, e.end_us AS end, COALESCE(e.end_reason, '') AS reason, e.archived,
    e.parent_id AS parent, e.unmanaged, e.priority, e.num_trials AS trials, e.checkpoint_size AS checkpointBytes,
    COALESCE(json_extract(e.config, '$.hyperparameters'), '{{}}') AS hyperparameters
FROM experiments e JOIN users u ON u.id = e.owner_id
JOIN projects p ON p.id = e.project_id JOIN workspaces w ON w.id = p.workspace_id
"""  # noqa: S608 - a constant
_TRIALS = f"""
SELECT t.id, t.experiment_id AS experiment, {_STATE.format(row="t", advance=TRIAL_ADVANCE)}, t.hparams, t.progress,
    t.total_batches AS batches, t.restarts, t.run_id AS runs, t.start_us AS start, t.end_us AS end,
    t.searcher_metric_value AS best, b.steps AS bestBatch, l.steps AS latestBatch,
    (SELECT j.value FROM json_each(l.metrics) j WHERE j.key = e.searcher_metric) AS latest,
    t.checkpoint_count AS checkpoints, t.checkpoint_size AS checkpointBytes, t.best_checkpoint_uuid AS bestCheckpoint,
    t.is_stopped_by_searcher AS stoppedBySearcher, t.early_exit AS earlyExit, t.warm_start_uuid AS warmStart,
    COALESCE((SELECT json_array_length(a.slots) FROM allocations a WHERE a.trial_id = t.id ORDER BY a.run_id DESC LIMIT 1), 0)
        AS slots
FROM trials t JOIN experiments e ON e.id = t.experiment_id
LEFT JOIN metrics b ON b.id = t.best_validation_id
LEFT JOIN metrics l ON l.id = t.latest_validation_id
"""  # noqa: S608 - a constant
_CHECKPOINTS = """
SELECT c.uuid AS id, c.trial_id AS trial, c.steps AS batch,
    CASE WHEN c.deleting_us IS NULL THEN c.state ELSE 'DELETING' END AS state,
    c.size AS bytes, (SELECT COUNT(*) FROM json_each(c.resources) r WHERE r.key NOT LIKE '%/') AS files, c.report_us AS time,
    c.manifest_sha256 AS manifest, CASE WHEN json_valid(c.metadata) THEN json_extract(c.metadata, '$.format') END AS format,
    CASE WHEN json_valid(c.metadata) THEN json_extract(c.metadata, '$.engines') END AS engines,
    (SELECT j.value FROM metrics m CROSS JOIN json_each(m.metrics) j WHERE m.trial_id = c.trial_id
        AND m.group_name = 'validation' AND m.steps = c.steps AND m.steps >= 0 AND m.archived = 0
        AND j.key = e.searcher_metric ORDER BY m.run_id DESC LIMIT 1) AS metric,
    (SELECT json_group_array(json_object('name', o.name, 'version', v.version)) FROM model_versions v
        JOIN models o ON o.id = v.model_id WHERE v.checkpoint_uuid = c.uuid) AS models
FROM checkpoints c JOIN experiments e ON e.id = c.experiment_id WHERE c.experiment_id = ?
ORDER BY c.report_us DESC, c.uuid LIMIT ?
"""
MAX_METRICS = 10_000  # metric names per response, as many as a trial may have
MAX_CHECKPOINTS = 5000  # per experiment, newest first


_CONVERTERS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("smallerIsBetter", "archived", "unmanaged", "stoppedBySearcher"), bool),
    **dict.fromkeys(("start", "end", "time"), format_us),
    **dict.fromkeys(("best", "latest"), finite),
    **dict.fromkeys(("labels", "models"), json.loads),
}
"""Name in the page's JSON -> converter of the column's value."""


def _fetch(connection: sqlite3.Connection, sql: str, parameters: Parameters = ()) -> list[Json]:
    cursor = connection.execute(sql, parameters)
    cursor.row_factory = None
    names = [column[0] for column in cursor.description]
    converters = [(idx, _CONVERTERS[name]) for idx, name in enumerate(names) if name in _CONVERTERS]
    found = []
    for row in cursor:
        values = list(row)
        for idx, convert in converters:
            if values[idx] is not None:
                values[idx] = convert(values[idx])
        found.append(dict(zip(names, values, strict=True)))
    return found


def experiments(connection: sqlite3.Connection, ids: Sequence[int] = ()) -> list[Json]:
    """Return experiments ``ids`` (empty: all), newest first; secrets are not masked."""
    where = "WHERE e.id IN (SELECT value FROM json_each(?))" if ids else ""
    values = (json.dumps(list(ids)),) if ids else ()
    return _fetch(connection, f"{_EXPERIMENTS} {where} ORDER BY e.id DESC", values)


def trials(
    connection: sqlite3.Connection, ids: Sequence[int] = (), experiment_id: int | None = None
) -> list[Json]:
    """Return trials, sorted by id; secrets are not masked.

    Filters by ``ids`` unless empty, and by ``experiment_id`` unless None. Without both, the result is empty.
    """
    where = Conditions()
    where.need_equal("t.experiment_id", experiment_id)
    if ids or experiment_id is None:
        where.need("t.id IN (SELECT value FROM json_each(?))", json.dumps(list(ids)))
    return _fetch(connection, f"{_TRIALS} {where.sql} ORDER BY t.id", where.values)


def checkpoints(connection: sqlite3.Connection, experiment_id: int) -> list[Json]:
    """Return an experiment's newest checkpoints, at most ``MAX_CHECKPOINTS`` + 1.

    If the result exceeds ``MAX_CHECKPOINTS``, the page says that the list is truncated.
    """
    return _fetch(connection, _CHECKPOINTS, (experiment_id, MAX_CHECKPOINTS + 1))


def experiment_of_trial(connection: sqlite3.Connection, trial_id: int) -> int | None:
    return fetch_value(int, connection, "SELECT experiment_id FROM trials WHERE id = ?", (trial_id,))


def records_per_epoch(connection: sqlite3.Connection, experiment_id: int) -> int | None:
    """Return ``records_per_epoch`` of an experiment's config; None if 0 or not set."""
    sql = "SELECT json_extract(config, '$.records_per_epoch') FROM experiments WHERE id = ?"
    return fetch_value(int, connection, sql, (experiment_id,)) or None


def metric_names(
    connection: sqlite3.Connection,
    experiment_id: int | None = None,
    trial_ids: Sequence[int] = (),
) -> list[tuple[str, str]]:
    """Return (group, name) of at most ``MAX_METRICS`` + 1 numeric metrics.

    The metrics are those of an experiment's trials or, without ``experiment_id``, of ``trial_ids``.
    """
    where = Conditions()
    if experiment_id is not None:
        where.need("t.experiment_id = ?", experiment_id)
    else:
        where.need("t.id IN (SELECT value FROM json_each(?))", json.dumps(list(trial_ids)))
    where.need("json_extract(s.summary, '$.type') = 'number'")
    rows = connection.execute(
        "SELECT DISTINCT s.group_name, s.name FROM trials t CROSS JOIN metric_summaries s ON s.trial_id = t.id "  # noqa: S608 - constants
        f"{where.sql} ORDER BY s.group_name, s.name LIMIT ?",
        (*where.values, MAX_METRICS + 1),
    )
    return [(group, name) for group, name in rows]


def runs(connection: sqlite3.Connection, trial_id: int) -> list[Allocation]:
    return fetch_all(
        Allocation, connection, "SELECT * FROM allocations WHERE trial_id = ? ORDER BY run_id", (trial_id,)
    )


# Searches of dsat (the autotuner) are found by the labels of their experiments.
_LABELLED = """
SELECT e.id, e.name, e.description, e.state, u.username, j.value AS label, e.start_us, e.end_us, e.end_reason, e.searcher_metric,
    e.smaller_is_better, e.slots_per_trial, e.notes
FROM experiments e JOIN users u ON u.id = e.owner_id, json_each(e.labels) j
WHERE e.labels LIKE '%"dsat-%' AND j.value LIKE ? ORDER BY e.id
"""


@dataclasses.dataclass(frozen=True, slots=True)
class LabelledExperiment:
    """An experiment of a dsat search, with the label that contains the search's id."""

    id: int
    name: str
    description: str
    state: str
    username: str
    label: str
    start_us: int
    end_us: int | None
    end_reason: str | None
    searcher_metric: str
    smaller_is_better: bool
    slots_per_trial: int
    notes: str


def labelled(connection: sqlite3.Connection, search_id: str = "") -> list[LabelledExperiment]:
    """Return the experiments of one dsat search ("": of all searches), sorted by id."""
    return fetch_all(LabelledExperiment, connection, _LABELLED, (f"dsat-{search_id}%",))
