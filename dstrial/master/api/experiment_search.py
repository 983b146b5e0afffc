"""Tables of experiments of Determined's web interface, and their columns.

Experiments are found by filter and order.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from determined.common.api import bindings

from dstrial.master.api.run_filters import HPARAM, METADATA, column_kinds, in_order, wanted_by
from dstrial.master.api.table_columns import Column, experiment_table, run_table
from dstrial.master.clock import now_us
from dstrial.master.http.messages import Page, message, page_of
from dstrial.master.http.router import USER, ApiRequest, route
from dstrial.master.http.serializers import as_data, experiment_json, trial_json
from dstrial.master.services import Services
from dstrial.master.store import projects
from dstrial.master.store.database import Connection
from dstrial.master.store.views import experiment_search, listings

_OF_RUNS = bindings.v1TableType.RUN.value
_PLACES = {"training": "TRAINING", "validation": "VALIDATIONS"}
_MAX_KEYS = 10_000
"""Most hyperparameters, and keys of metadata, that are columns."""

_MAX_DEPTH = 20


async def search_experiments(request: ApiRequest) -> dict[str, Any]:
    """``POST experiments-search``: a page of the experiments that a filter wants.

    Each comes with its best trial.
    """
    body, services = request.body(), request.services
    table = experiment_table(services.settings.pool_name, services.secret_names)
    project_id, text, sort = body.integer("projectId") or None, body.text("filter"), body.text("sort")
    offset, limit = body.integer("offset", -(2**31), 2**31), body.integer("limit", -(2**31), 2**31)
    is_wanted = wanted_by(text, table)
    kinds = column_kinds(text, sort, table)

    def read(connection: Connection) -> tuple[Page, list[dict[str, Any]]]:
        if project_id is not None:
            projects.require(connection, project_id)
        rows = experiment_search.list_searched(
            connection,
            project_id,
            has_hparams=HPARAM in kinds,
            has_metrics=bool(kinds - {HPARAM, METADATA}),
        )
        found = in_order([row for row in rows if is_wanted(row)], sort, table)
        page = page_of(len(found), offset, limit)
        listed = listings.experiments_of(connection, [row.id for row in found[page.start : page.end]])
        best = [row.best_trial_id for row in listed if row.best_trial_id is not None]
        trials = listings.trials_of(connection, best, now_us())
        # Here and not in the loop: a page may have all of ten thousand.
        return page, [_found(services, row, trials.get(row.best_trial_id or 0)) for row in listed]

    page, experiments = await services.read(read)
    return message(bindings.v1SearchExperimentsResponse, experiments=experiments, pagination=page.to_json())


def _found(
    services: Services, row: listings.ListedExperiment, best: listings.ListedTrial | None
) -> dict[str, Any]:
    return message(
        bindings.v1SearchExperimentExperiment,
        experiment=experiment_json(services, row),
        bestTrial=None if best is None else trial_json(best, services.secret_names),
    )


async def list_columns(request: ApiRequest) -> dict[str, Any]:
    """``GET projects/{id}/columns``: of the table of experiments, or of runs."""
    project_id, services = request.path_params["project_id"], request.services
    is_of_runs = request.query_choice("tableType", bindings.v1TableType) == _OF_RUNS
    pool_name, names = services.settings.pool_name, services.secret_names
    own: Mapping[str, Column[Any]] = (
        run_table(pool_name, names).columns if is_of_runs else experiment_table(pool_name, names).columns
    )

    def read(connection: Connection) -> Any:
        projects.require(connection, project_id)
        hparams = (
            _leaves(experiment_search.hparams_of_project(connection, project_id))
            if is_of_runs
            else _leaves(map(_sampled, experiment_search.hyperparameters_of_project(connection, project_id)))
        )
        place = "RUN_HYPERPARAMETERS" if is_of_runs else "HYPERPARAMETERS"
        columns = [
            *(_column(name, one.kind, one.place, one.title) for name, one in own.items() if one.title),
            *(_column(f"{HPARAM}.{key}", kind, place) for key, kind in hparams.items()),
        ]
        for metric in experiment_search.metrics_of_project(connection, project_id):
            kind = "NUMBER" if metric.is_number else "UNSPECIFIED"
            columns += [
                _column(
                    f"{metric.group}.{metric.name}.{summary}",
                    kind,
                    _PLACES.get(metric.group, "CUSTOM_METRIC"),
                )
                for summary in (experiment_search.SUMMARIES if metric.is_number else ("last",))
            ]
        if is_of_runs:
            metadata = _leaves(projects.metadata_objects(connection, project_id))
            columns += [_column(f"{METADATA}.{key}", kind, "RUN_METADATA") for key, kind in metadata.items()]
        # Written already: the loop is not to do it for forty thousand.
        return as_data(columns)

    return message(bindings.v1GetProjectColumnsResponse, columns=await services.read(read))


def _column(name: str, kind: str, place: str, title: str = "") -> dict[str, Any]:
    return message(
        bindings.v1ProjectColumn,
        column=name,
        location=f"LOCATION_TYPE_{place}",
        type=f"COLUMN_TYPE_{kind}",
        displayName=title,
    )


def _leaves(objects: Iterable[object]) -> dict[str, str]:
    """Return the dotted keys of all values in some objects, and each one's kind.

    Mixed ones have no kind.
    """
    kinds: dict[str, str] = {}
    for key, kind in itertools.chain.from_iterable(_walk(one, "", 0) for one in objects):
        if key not in kinds and len(kinds) >= _MAX_KEYS:
            continue
        kinds[key] = kind if kinds.get(key, kind) == kind else "UNSPECIFIED"
    return dict(sorted(kinds.items()))


def _walk(value: object, key: str, depth: int) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and depth < _MAX_DEPTH:
        for name, inner in value.items():
            yield from _walk(inner, f"{key}.{name}" if key else str(name), depth + 1)
    elif key:
        yield key, _kind_of(value)


def _kind_of(value: object) -> str:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return "NUMBER"
    return "TEXT" if isinstance(value, str) else "ARRAY" if isinstance(value, list) else "UNSPECIFIED"


def _sampled(hyperparameters: object) -> object:
    """Return a config's hyperparameters with an example of each.

    The example stands in place of what a searcher is told.
    """
    if not isinstance(hyperparameters, dict):
        return hyperparameters
    kind = hyperparameters.get("type")
    if kind == "const":
        return hyperparameters.get("val")
    if kind == "categorical":
        values = hyperparameters.get("vals")
        kinds = {_kind_of(one) for one in values} if isinstance(values, list) else set()
        return values[0] if isinstance(values, list) and len(kinds) == 1 else None
    if kind in ("int", "double", "log"):
        return 0
    return {name: _sampled(inner) for name, inner in hyperparameters.items()}


async def show_metric_ranges(request: ApiRequest) -> dict[str, Any]:
    """``GET projects/{id}/experiments/metric-ranges``: those that a table shows.

    There is one of each number in the table of experiments.
    """
    project_id = request.path_params["project_id"]

    def read(connection: Connection) -> Any:
        projects.require(connection, project_id)
        ranges = [
            _range(f"{one.group}.{one.name}.{one.summary}", one.low, one.high)
            for one in experiment_search.metric_ranges(connection, project_id)
        ]
        of_best = experiment_search.best_metric_range(connection, project_id)
        if of_best is not None:
            ranges.append(_range("searcherMetricsVal", *of_best))
        return as_data(ranges)

    return message(bindings.v1GetProjectNumericMetricsRangeResponse, ranges=await request.services.read(read))


def _range(name: str, low: float, high: float) -> dict[str, Any]:
    return message(bindings.v1MetricsRange, metricsName=name, min=low, max=high)


async def list_labels(request: ApiRequest) -> dict[str, Any]:
    """``GET experiment/labels``: the most used first.

    They are those of a project's experiments, or of all.
    """
    project_id = request.query_int("projectId") or None

    def read(connection: Connection) -> list[str]:
        if project_id is not None:
            projects.require(connection, project_id)
        return experiment_search.popular_labels(connection, project_id)

    return message(bindings.v1GetExperimentLabelsResponse, labels=await request.services.read(read))


routes = [
    route("POST", "/experiments-search", search_experiments, access=USER),
    route("GET", "/projects/{project_id:int}/columns", list_columns, access=USER),
    route("GET", "/projects/{project_id:int}/experiments/metric-ranges", show_metric_ranges, access=USER),
    route("GET", "/experiment/labels", list_labels, access=USER),
]
