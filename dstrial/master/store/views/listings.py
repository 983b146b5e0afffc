"""Lists of experiments, trials and runs (all trials of a project), page by page."""

from __future__ import annotations

import dataclasses
import sqlite3
from collections.abc import Sequence

from dstrial.master.store.database import Conditions, fetch_all, fetch_value, marks
from dstrial.master.store.experiments import Experiment
from dstrial.master.store.reports.metric_summaries import SUMMARY_METRICS
from dstrial.master.store.trials import Trial

_EXPERIMENT_ORDER = {
    "SORT_BY_ID": "e.id",
    "SORT_BY_DESCRIPTION": "e.description",
    "SORT_BY_START_TIME": "e.start_us",
    "SORT_BY_END_TIME": "e.end_us",
    "SORT_BY_STATE": "e.state",
    "SORT_BY_NUM_TRIALS": "e.num_trials",
    "SORT_BY_PROGRESS": "e.progress",
    "SORT_BY_USER": "(SELECT o.username FROM users o WHERE o.id = e.owner_id)",
    "SORT_BY_NAME": "e.name",
    "SORT_BY_FORKED_FROM": "e.parent_id",
    "SORT_BY_CHECKPOINT_SIZE": "e.checkpoint_size",
    "SORT_BY_CHECKPOINT_COUNT": "e.checkpoint_count",
    "SORT_BY_SEARCHER_METRIC_VAL": "e.best_metric",
    "SORT_BY_PROJECT_ID": "e.project_id",
}
_OWN_LOG_DAYS = "COALESCE(t.log_retention_days, (SELECT o.log_retention_days FROM experiments o WHERE o.id = t.experiment_id))"
_TRIAL_ORDER = {
    "SORT_BY_ID": "t.id",
    "SORT_BY_START_TIME": "t.start_us",
    "SORT_BY_END_TIME": "t.end_us",
    "SORT_BY_STATE": "t.state",
    "SORT_BY_BEST_VALIDATION_METRIC": "t.searcher_metric_value",
    "SORT_BY_LATEST_VALIDATION_METRIC": "t.latest_validation_id",
    "SORT_BY_BATCHES_PROCESSED": "t.total_batches",
    "SORT_BY_DURATION": "COALESCE(t.end_us, 9e18) - t.start_us",
    "SORT_BY_RESTARTS": "t.restarts",
    "SORT_BY_CHECKPOINT_SIZE": "t.checkpoint_size",
    "SORT_BY_LOG_RETENTION_DAYS": _OWN_LOG_DAYS,
}
# Phase of an active experiment or trial: NULL is queued, 1 starting, 2 running.
EXPERIMENT_ADVANCE = """
CASE WHEN e.unmanaged
    THEN (SELECT MAX(2) FROM trials t WHERE t.experiment_id = e.id AND t.state = 'ACTIVE' AND t.run_id > 0)
    ELSE (SELECT MAX(CASE WHEN a.state = 'RUNNING' THEN 2 ELSE 1 END) FROM allocations a
        WHERE a.state IN ('ASSIGNED', 'RUNNING') AND a.experiment_id = e.id) END"""
TRIAL_ADVANCE = """
CASE WHEN e.unmanaged THEN CASE WHEN t.run_id > 0 THEN 2 END
    ELSE (SELECT MAX(CASE WHEN a.state = 'RUNNING' THEN 2 ELSE 1 END) FROM allocations a
        WHERE a.trial_id = t.id AND a.state != 'TERMINATED') END"""
_EXPERIMENT_SELECT = f"""
SELECT e.*, u.username, u.display_name, p.name AS project_name, p.workspace_id, w.name AS workspace_name,
    p.owner_id AS project_owner_id, p.is_archived OR w.is_archived AS is_parent_archived,
    {EXPERIMENT_ADVANCE} AS advance
FROM experiments e JOIN users u ON u.id = e.owner_id
JOIN projects p ON p.id = e.project_id JOIN workspaces w ON w.id = p.workspace_id
"""  # noqa: S608 - a constant
_IS_PARENT_ARCHIVED = (
    "e.project_id IN (SELECT p.id FROM projects p JOIN workspaces w ON w.id = p.workspace_id "
    "WHERE p.is_archived OR w.is_archived)"
)
_TRIAL_SELECT = f"""
SELECT t.*, {_OWN_LOG_DAYS} AS own_log_days, e.searcher_metric,
    b.steps AS best_steps, b.end_us AS best_us, b.metrics AS best_metrics,
    l.steps AS latest_steps, l.end_us AS latest_us, l.metrics AS latest_metrics,
    c.steps AS checkpoint_steps, c.report_us AS checkpoint_us, c.state AS checkpoint_state,
    c.resources AS checkpoint_resources, c.metadata AS checkpoint_metadata,
    {TRIAL_ADVANCE} AS advance,
    CASE WHEN e.unmanaged THEN COALESCE(t.end_us, ?) - t.start_us
        ELSE (SELECT COALESCE(SUM(COALESCE(a.end_us, ?) - a.start_us), 0) FROM allocations a
            WHERE a.trial_id = t.id) END AS run_us,
    (SELECT json_group_array(k.id) FROM tasks k WHERE k.trial_id = t.id) AS task_ids,
    {SUMMARY_METRICS} AS summary_metrics
FROM trials t JOIN experiments e ON e.id = t.experiment_id
LEFT JOIN metrics b ON b.id = t.best_validation_id
LEFT JOIN metrics l ON l.id = t.latest_validation_id
LEFT JOIN checkpoints c ON c.uuid = t.best_checkpoint_uuid
"""  # noqa: S608 - a constant


@dataclasses.dataclass(frozen=True, slots=True)
class ListedExperiment(Experiment):
    username: str
    display_name: str
    project_name: str
    workspace_id: int
    workspace_name: str
    project_owner_id: int
    is_parent_archived: bool
    advance: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class ListedTrial(Trial):
    """A trial with its best and latest validation and its best checkpoint."""

    own_log_days: int | None  # log retention of the trial or experiment; None: as set for the master
    searcher_metric: str
    best_steps: int | None
    best_us: int | None
    best_metrics: str | None
    latest_steps: int | None
    latest_us: int | None
    latest_metrics: str | None
    checkpoint_steps: int | None
    checkpoint_us: int | None
    checkpoint_state: str | None
    checkpoint_resources: str | None
    checkpoint_metadata: str | None
    advance: int | None
    run_us: int
    task_ids: str
    summary_metrics: str


@dataclasses.dataclass(frozen=True, slots=True)
class ExperimentFilter:
    """Filter of experiments; a field that is None or empty matches all experiments."""

    archived: bool | None = None  # True: only archived experiments; False: only others
    with_parents: bool = False  # count experiments of archived projects and workspaces as archived
    name: str | None = None  # substring, case-insensitive
    description: str | None = None
    users: Sequence[str] = ()
    user_ids: Sequence[int] = ()
    states: Sequence[str] = ()  # as stored, without STATE_
    labels: Sequence[str] = ()  # an experiment must have all of these labels
    ids: Sequence[int] = ()
    not_ids: Sequence[int] = ()
    above: int | None = None
    below: int | None = None
    project_id: int | None = None


def _where(wanted: ExperimentFilter) -> Conditions:
    where = Conditions()
    archived = f"(e.archived OR {_IS_PARENT_ARCHIVED})" if wanted.with_parents else "e.archived"
    where.need_equal(archived, wanted.archived)
    where.need_part("e.name", wanted.name)
    where.need_part("e.description", wanted.description)
    if wanted.users:
        named = f"SELECT id FROM users WHERE username IN ({marks(wanted.users)})"  # noqa: S608 - only marks
        where.need(f"e.owner_id IN ({named})", *wanted.users)
    where.need_one_of("e.owner_id", wanted.user_ids)
    where.need_one_of("e.id", wanted.ids)
    where.need_one_of("e.state", wanted.states)
    if wanted.not_ids:
        where.need(f"e.id NOT IN ({marks(wanted.not_ids)})", *wanted.not_ids)
    where.need_equal("e.project_id", wanted.project_id)
    if wanted.above is not None:
        where.need("e.id > ?", wanted.above)
    if wanted.below is not None:
        where.need("e.id < ?", wanted.below)
    where.need_labels("e.labels", wanted.labels)
    return where


def count_experiments(connection: sqlite3.Connection, wanted: ExperimentFilter) -> int:
    where = _where(wanted)
    sql = f"SELECT COUNT(*) FROM experiments e {where.sql}"  # noqa: S608 - constants
    return fetch_value(int, connection, sql, where.values) or 0


def list_experiments(
    connection: sqlite3.Connection,
    wanted: ExperimentFilter,
    *,
    sort_by: str | None = None,
    is_descending: bool = False,
    offset: int = 0,
    limit: int = -1,
) -> list[ListedExperiment]:
    """Return a page of experiments, sorted by id or ``sort_by`` ("SORT_BY_NAME" etc.).

    An unknown ``sort_by`` sorts by id. ``limit`` -1 means no limit.
    """
    where = _where(wanted)
    order = _order_by(_EXPERIMENT_ORDER.get(sort_by or "", "e.id"), "e.id", is_descending=is_descending)
    page = f"SELECT e.id FROM experiments e {where.sql} {order} LIMIT ? OFFSET ?"  # noqa: S608 - constants
    sql = _of_page(_EXPERIMENT_SELECT, "e.id", page, order)
    return fetch_all(ListedExperiment, connection, sql, (*where.values, limit, offset))


def _of_page(select: str, id_column: str, page: str, order: str) -> str:
    return f"{select} WHERE {id_column} IN ({page}) {order}"


def _order_by(column: str, id_column: str, *, is_descending: bool) -> str:
    """Return an ORDER BY clause that sorts NULL last and breaks ties by id."""
    if is_descending:
        return f"ORDER BY {column} DESC, {id_column} DESC"
    nulls = "" if column == id_column else f"{column} IS NULL, "
    return f"ORDER BY {nulls}{column}, {id_column}"


def get_experiment(connection: sqlite3.Connection, experiment_id: int) -> ListedExperiment | None:
    rows = list_experiments(connection, ExperimentFilter(ids=[experiment_id]))
    return rows[0] if rows else None


def count_trials(connection: sqlite3.Connection, experiment_id: int, states: Sequence[str]) -> int:
    sql = "SELECT num_trials FROM experiments WHERE id = ?"
    if states:
        sql = f"SELECT COUNT(*) FROM trials WHERE experiment_id = ? AND state IN ({marks(states)})"  # noqa: S608 - only marks
    return fetch_value(int, connection, sql, (experiment_id, *states)) or 0


def list_trials(
    connection: sqlite3.Connection,
    *,
    now_us: int,
    experiment_id: int | None = None,
    trial_id: int | None = None,
    states: Sequence[str] = (),
    sort_by: str | None = None,
    is_descending: bool = False,
    offset: int = 0,
    limit: int = -1,
) -> list[ListedTrial]:
    """Return a page of trials, sorted by id or ``sort_by`` ("SORT_BY_..." values).

    An unknown ``sort_by`` sorts by id. ``limit`` -1 means no limit. Durations of active allocations end at ``now_us``.
    """
    where = Conditions()
    where.need_equal("t.id", trial_id)
    where.need_equal("t.experiment_id", experiment_id)
    where.need_one_of("t.state", states)
    order = _order_by(_TRIAL_ORDER.get(sort_by or "", "t.id"), "t.id", is_descending=is_descending)
    page = f"SELECT t.id FROM trials t {where.sql} {order} LIMIT ? OFFSET ?"  # noqa: S608 - constants
    sql = _of_page(_TRIAL_SELECT, "t.id", page, order)
    return fetch_all(ListedTrial, connection, sql, (now_us, now_us, *where.values, limit, offset))
