"""Experiments as a search looks at them, and what names a project has.

The names are those of its metrics and hyperparameters. A search reads every experiment of a project, so that it reads of each no
more than it is asked about.
"""

from __future__ import annotations

import dataclasses
import json
import sqlite3
from collections.abc import Iterator

from dstrial.master.store.database import fetch_all
from dstrial.master.store.reports.metric_summaries import SUMMARY_METRICS

_SELECT = """
SELECT e.id, e.name, e.description, e.labels, e.parent_id, e.start_us, e.end_us, e.state, e.archived, e.unmanaged,
    e.searcher_type, e.searcher_metric, e.best_metric, e.progress, e.external_id, e.best_trial_id, e.project_id,
    u.username, u.display_name, p.is_archived OR w.is_archived AS is_parent_archived,
    COUNT(t.id) AS num_trials, COALESCE(SUM(t.checkpoint_count), 0) AS checkpoint_count,
    COALESCE(SUM(t.checkpoint_size), 0) AS checkpoint_size, MIN(t.external_id) AS external_trial_id,
    {hparams} AS hyperparameters, {summaries} AS summary_metrics
FROM experiments e JOIN users u ON u.id = e.owner_id
JOIN projects p ON p.id = e.project_id JOIN workspaces w ON w.id = p.workspace_id
LEFT JOIN trials t ON t.experiment_id = e.id
WHERE :project IS NULL OR e.project_id = :project GROUP BY e.id ORDER BY e.id
"""


@dataclasses.dataclass(frozen=True, slots=True)
class SearchedExperiment:
    """What may be asked of an experiment; ``schema.sql`` says what the columns hold.

    Attributes:
        external_trial_id: of one of its trials, None where none has any.
        hyperparameters: JSON of its config; ``{}`` where nobody asks.
        summary_metrics: JSON of its best trial, as in lists; ``{}`` where nobody asks.
    """

    id: int
    name: str
    description: str
    labels: str
    parent_id: int | None
    start_us: int
    end_us: int | None
    state: str
    archived: bool
    unmanaged: bool
    searcher_type: str
    searcher_metric: str
    best_metric: float | None
    progress: float
    external_id: str | None
    best_trial_id: int | None
    project_id: int
    username: str
    display_name: str
    is_parent_archived: bool
    num_trials: int
    checkpoint_count: int
    checkpoint_size: int
    external_trial_id: str | None
    hyperparameters: str
    summary_metrics: str


def list_searched(
    connection: sqlite3.Connection, project_id: int | None, *, has_hparams: bool, has_metrics: bool
) -> list[SearchedExperiment]:
    """Return the experiments of a project, or all, by number.

    Args:
        connection: what to read from.
        project_id: whose; None for all.
        has_hparams: whether hyperparameters are asked about.
        has_metrics: whether metrics of the best trial are.
    """
    of_best = SUMMARY_METRICS.replace("t.id", "e.best_trial_id")
    sql = _SELECT.format(
        hparams="COALESCE(json_extract(e.config, '$.hyperparameters'), '{}')" if has_hparams else "'{}'",
        summaries=f"COALESCE({of_best}, '{{}}')" if has_metrics else "'{}'",
    )
    return fetch_all(SearchedExperiment, connection, sql, {"project": project_id})


@dataclasses.dataclass(frozen=True, slots=True)
class NamedMetric:
    """A metric that was reported somewhere in a project.

    Attributes:
        group: its group.
        name: its name.
        is_number: whether it is a number wherever it was reported.
    """

    group: str
    name: str
    is_number: bool


MAX_METRICS = 10_000
"""Metrics of a project that are told of; others are left out."""


def metrics_of_project(connection: sqlite3.Connection, project_id: int) -> list[NamedMetric]:
    """Return the metrics that a project's trials have reported, by group and name."""
    rows = connection.execute(
        "SELECT s.group_name, s.name, MIN(COALESCE(json_extract(s.summary, '$.type') = 'number', 0)) AS is_number "
        "FROM experiments e JOIN trials t ON t.experiment_id = e.id JOIN metric_summaries s ON s.trial_id = t.id "
        "WHERE e.project_id = ? GROUP BY s.group_name, s.name ORDER BY s.group_name, s.name LIMIT ?",
        (project_id, MAX_METRICS),
    )
    return [NamedMetric(str(row["group_name"]), str(row["name"]), bool(row["is_number"])) for row in rows]


@dataclasses.dataclass(frozen=True, slots=True)
class MetricRange:
    """Between what a number of the best trials' summaries lies in a project.

    Attributes:
        group: of the metric.
        name: of the metric.
        summary: which number: last, max, mean or min.
        low: the least.
        high: the greatest.
    """

    group: str
    name: str
    summary: str
    low: float
    high: float


SUMMARIES = ("last", "max", "mean", "min")
"""The numbers of a metric's summary that tables show."""


def metric_ranges(connection: sqlite3.Connection, project_id: int) -> list[MetricRange]:
    """Return the ranges of the metrics of a project's experiments.

    They are those of the best trial of each experiment. NaN and infinities are no part of a range.
    """
    values = ", ".join(f"json_extract(s.summary, '$.{summary}') AS {summary}_" for summary in SUMMARIES)
    ranges = ", ".join(
        f"MIN(CASE WHEN typeof({summary}_) != 'text' THEN {summary}_ END) AS {summary}_low, "
        f"MAX(CASE WHEN typeof({summary}_) != 'text' THEN {summary}_ END) AS {summary}_high"
        for summary in SUMMARIES
    )
    rows = connection.execute(
        f"SELECT group_name, name, {ranges} FROM (SELECT s.group_name, s.name, {values} "  # noqa: S608 - constants
        "FROM experiments e JOIN metric_summaries s ON s.trial_id = e.best_trial_id "
        "WHERE e.project_id = ? AND json_extract(s.summary, '$.type') = 'number') "
        "GROUP BY group_name, name ORDER BY group_name, name LIMIT ?",
        (project_id, MAX_METRICS),
    )
    return [
        MetricRange(str(row["group_name"]), str(row["name"]), summary, float(low), float(high))
        for row in rows
        for summary in SUMMARIES
        if (low := row[f"{summary}_low"]) is not None and (high := row[f"{summary}_high"]) is not None
    ]


def best_metric_range(connection: sqlite3.Connection, project_id: int) -> tuple[float, float] | None:
    """Return the range of the searchers' metric over a project's experiments.

    None without any.
    """
    row = connection.execute(
        "SELECT MIN(best_metric) AS low, MAX(best_metric) AS high FROM experiments "
        "WHERE project_id = ? AND ABS(best_metric) < 9e999",
        (project_id,),
    ).fetchone()
    return None if row["low"] is None else (float(row["low"]), float(row["high"]))


def hyperparameters_of_project(connection: sqlite3.Connection, project_id: int) -> Iterator[object]:
    """Yield the hyperparameters of each experiment's config of a project.

    Equal ones come once.
    """
    for row in connection.execute(
        "SELECT DISTINCT json_extract(config, '$.hyperparameters') AS found FROM experiments WHERE project_id = ?",
        (project_id,),
    ):
        yield json.loads(row["found"] or "{}")


def hparams_of_project(connection: sqlite3.Connection, project_id: int) -> Iterator[object]:
    """Yield the hyperparameters of each trial of a project, equal ones once."""
    for row in connection.execute(
        "SELECT DISTINCT t.hparams FROM trials t JOIN experiments e ON e.id = t.experiment_id WHERE e.project_id = ?",
        (project_id,),
    ):
        yield json.loads(row["hparams"])


def popular_labels(connection: sqlite3.Connection, project_id: int | None) -> list[str]:
    """Return the labels of experiments, the most used first.

    The experiments are those of a project, or all.
    """
    rows = connection.execute(
        "SELECT j.value AS label FROM experiments e, json_each(e.labels) j "
        "WHERE :project IS NULL OR e.project_id = :project GROUP BY j.value ORDER BY COUNT(*) DESC, j.value",
        {"project": project_id},
    )
    return [str(row["label"]) for row in rows]
