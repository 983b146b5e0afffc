"""Columns of the tables of runs and of experiments.

What is shown, filtered and ordered has the same names. Source: the protocol's names of columns, and where each belongs
(``v1LocationType``).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from dstrial.config.secrets import SecretNames, masked_json
from dstrial.master.clock import format_us
from dstrial.master.http.serializers import elapsed_s
from dstrial.master.store.views.experiment_search import SearchedExperiment
from dstrial.master.store.views.listings import Run

Row = TypeVar("Row")

_TEXT, _NUMBER, _DATE, _ARRAY = "TEXT", "NUMBER", "DATE", "ARRAY"
_RUN, _EXPERIMENT = "RUN", "EXPERIMENT"


@dataclasses.dataclass(frozen=True, slots=True)
class Column(Generic[Row]):
    """A column that every table of a kind has.

    Attributes:
        find: reads its value from a row.
        title: what a person calls it; empty for one that is filtered by and not offered.
        kind: ``v1ColumnType`` without its prefix.
        place: ``v1LocationType`` without its prefix.
    """

    find: Callable[[Row], Any]
    title: str = ""
    kind: str = _TEXT
    place: str = _RUN


@dataclasses.dataclass(frozen=True, slots=True)
class Table(Generic[Row]):
    """What may be asked of rows of one kind.

    Attributes:
        noun: what its rows are called.
        columns: by name, in the order in which they are offered.
        hparam: reads a hyperparameter, given its keys; a list where a search has several values.
        metadata: metadata of a row, JSON.
        summaries: summaries of a row's metrics, JSON.
        is_archived: whether a row is left out unless archived ones are asked for.
    """

    noun: str
    columns: Mapping[str, Column[Row]]
    hparam: Callable[[Row, list[str]], Any]
    metadata: Callable[[Row], str]
    summaries: Callable[[Row], str]
    is_archived: Callable[[Row], bool]


def below(value: Any, keys: list[str]) -> Any:
    """Return what lies under keys in nested objects, None where there is nothing."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _time(us: int | None) -> str | None:
    return None if us is None else format_us(us)


def run_table(pool_name: str, names: SecretNames) -> Table[Run]:
    """Return what may be asked of runs in a pool.

    Secrets are compared as they are shown.
    """
    columns: dict[str, Column[Run]] = {
        "id": Column(lambda row: row.id, "Global Run ID", _NUMBER),
        "localId": Column(lambda row: f"{row.project_key}-{row.id}", "Local ID"),
        "state": Column(lambda row: row.state, "State"),
        "startTime": Column(lambda row: format_us(row.start_us), "Start time", _DATE),
        "endTime": Column(lambda row: _time(row.end_us), "End time", _DATE),
        "duration": Column(lambda row: elapsed_s(row.start_us, row.end_us), "Duration", _NUMBER),
        "checkpointCount": Column(lambda row: row.checkpoint_count, "Checkpoints", _NUMBER),
        "checkpointSize": Column(lambda row: row.checkpoint_size, "Checkpoint size", _NUMBER),
        "externalRunId": Column(lambda row: row.external_id, "External run ID"),
        "searcherMetricsVal": Column(lambda row: row.searcher_metric_value, "Searcher metric value", _NUMBER),
        "archived": Column(lambda row: bool(row.experiment_archived), "Archived"),
        "user": Column(lambda row: row.username, "User"),
        "experimentId": Column(lambda row: row.experiment_id, "Search ID", _NUMBER, _EXPERIMENT),
        "experimentName": Column(lambda row: row.experiment_name, "Search name", _TEXT, _EXPERIMENT),
        "experimentDescription": Column(
            lambda row: row.experiment_description, "Search description", _TEXT, _EXPERIMENT
        ),
        "experimentProgress": Column(
            lambda row: row.experiment_progress, "Search progress", _NUMBER, _EXPERIMENT
        ),
        "tags": Column(lambda row: json.loads(row.labels), "Tags", _ARRAY, _EXPERIMENT),
        "forkedFrom": Column(lambda row: row.parent_id, "Forked", _NUMBER, _EXPERIMENT),
        "numTrials": Column(lambda row: row.num_trials, "Trials", _NUMBER, _EXPERIMENT),
        "isExpMultitrial": Column(lambda row: row.num_trials > 1, "Part of a search", _TEXT, _EXPERIMENT),
        "searcherType": Column(lambda row: row.searcher_type, "Searcher", _TEXT, _EXPERIMENT),
        "searcherMetric": Column(lambda row: row.searcher_metric, "Searcher metric", _TEXT, _EXPERIMENT),
        "externalExperimentId": Column(
            lambda row: row.external_experiment_id, "External experiment ID", _TEXT, _EXPERIMENT
        ),
        "parentArchived": Column(
            lambda row: bool(row.is_parent_archived), "Parent archived", _TEXT, _EXPERIMENT
        ),
        "resourcePool": Column(lambda _row: pool_name, "Resource pool", _TEXT, _EXPERIMENT),
        "name": Column(lambda row: row.experiment_name),
        "description": Column(lambda row: row.experiment_description),
        "userId": Column(lambda row: row.owner_id),
        "projectId": Column(lambda row: row.project_id),
    }
    return Table(
        noun="runs",
        columns=columns,
        # As it is shown: nobody is to guess a secret by asking what it is greater than.
        hparam=lambda row, keys: below(json.loads(masked_json(row.hparams, names)), keys),
        metadata=lambda row: row.metadata or "{}",
        summaries=lambda row: row.summary_metrics,
        is_archived=lambda row: bool(row.experiment_archived),
    )


def experiment_table(pool_name: str, names: SecretNames) -> Table[SearchedExperiment]:
    """Return what may be asked of experiments in a pool.

    Metrics are those of the best trial.
    """
    columns: dict[str, Column[SearchedExperiment]] = {
        "id": Column(lambda row: row.id, "ID", _NUMBER, _EXPERIMENT),
        "name": Column(lambda row: row.name, "Name", _TEXT, _EXPERIMENT),
        "description": Column(lambda row: row.description, "Description", _TEXT, _EXPERIMENT),
        "tags": Column(lambda row: json.loads(row.labels), "Tags", _ARRAY, _EXPERIMENT),
        "forkedFrom": Column(lambda row: row.parent_id, "Forked", _NUMBER, _EXPERIMENT),
        "startTime": Column(lambda row: format_us(row.start_us), "Start time", _DATE, _EXPERIMENT),
        "endTime": Column(lambda row: _time(row.end_us), "End time", _DATE, _EXPERIMENT),
        "duration": Column(lambda row: elapsed_s(row.start_us, row.end_us), "Duration", _NUMBER, _EXPERIMENT),
        "numTrials": Column(lambda row: row.num_trials, "Trials", _NUMBER, _EXPERIMENT),
        "state": Column(lambda row: row.state, "State", _TEXT, _EXPERIMENT),
        "searcherType": Column(lambda row: row.searcher_type, "Searcher", _TEXT, _EXPERIMENT),
        "resourcePool": Column(lambda _row: pool_name, "Resource pool", _TEXT, _EXPERIMENT),
        "progress": Column(lambda row: row.progress, "Progress", _NUMBER, _EXPERIMENT),
        "checkpointSize": Column(lambda row: row.checkpoint_size, "Checkpoint size", _NUMBER, _EXPERIMENT),
        "checkpointCount": Column(lambda row: row.checkpoint_count, "Checkpoints", _NUMBER, _EXPERIMENT),
        "user": Column(lambda row: row.display_name or row.username, "User", _TEXT, _EXPERIMENT),
        "searcherMetric": Column(lambda row: row.searcher_metric, "Searcher metric", _TEXT, _EXPERIMENT),
        "searcherMetricsVal": Column(
            lambda row: row.best_metric, "Searcher metric value", _NUMBER, _EXPERIMENT
        ),
        "externalExperimentId": Column(
            lambda row: row.external_id, "External experiment ID", _TEXT, _EXPERIMENT
        ),
        "externalTrialId": Column(lambda row: row.external_trial_id, "External trial ID", _TEXT, _EXPERIMENT),
        "archived": Column(lambda row: row.archived, "Archived", _TEXT, _EXPERIMENT),
        "parentArchived": Column(lambda row: bool(row.is_parent_archived)),
        "unmanaged": Column(lambda row: row.unmanaged),
        "username": Column(lambda row: row.username),
        "projectId": Column(lambda row: row.project_id),
    }

    def hparam(row: SearchedExperiment, keys: list[str]) -> Any:
        return _searched_values(below(json.loads(masked_json(row.hyperparameters, names)), keys))

    return Table(
        noun="experiments",
        columns=columns,
        hparam=hparam,
        metadata=lambda _row: "{}",
        summaries=lambda row: row.summary_metrics,
        is_archived=lambda row: row.archived,
    )


def _searched_values(found: Any) -> Any:
    """Return what a hyperparameter of a config may be.

    That is its value, its values, or its bounds.
    """
    kind = found.get("type") if isinstance(found, dict) else None
    if kind == "const":
        return found.get("val")
    if kind == "categorical":
        return found.get("vals")
    if kind in ("int", "double"):
        return [found.get("minval"), found.get("maxval")]
    if kind == "log":
        base, low, high = (found.get(name) for name in ("base", "minval", "maxval"))
        if all(isinstance(one, (int, float)) and not isinstance(one, bool) for one in (base, low, high)):
            try:
                return [float(base) ** low, float(base) ** high]
            except (OverflowError, ZeroDivisionError):
                return None
    return found
