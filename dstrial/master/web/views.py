"""JSON for the page's lists and charts, compact, each read in one snapshot."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, TypeAlias

import orjson

from dstrial.config.secrets import SecretNames, masked_json, masked_yaml
from dstrial.errors import RequestError
from dstrial.master.clock import format_us, now_us
from dstrial.master.http.router import USER, ApiRequest, route
from dstrial.master.http.serializers import as_data, shown_config, time_or_none
from dstrial.master.services import Services
from dstrial.master.store import allocations, experiments
from dstrial.master.store.database import Connection
from dstrial.master.store.reports import curves
from dstrial.master.store.reports.downsample import downsample
from dstrial.master.store.views import overviews
from dstrial.master.store.views.observe import stall_in

MAX_POINTS = 2000  # per curve
_MAX_SERIES_POINTS = 400_000  # per response, over all curves
_MAX_TRIALS = 1000  # curves per response
_SPARK_POINTS = 40
_ADVANCE = {None: "QUEUED", 1: "STARTING", 2: "RUNNING"}

Json: TypeAlias = dict[str, Any]


def _state(row: overviews.ExperimentOverview | overviews.TrialOverview) -> str:
    return _ADVANCE[row.advance] if row.state == "ACTIVE" else row.state


def finite(value: float | str | None) -> float | str | None:
    if isinstance(value, float) and value - value != 0:
        return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
    return value


def _experiment(row: overviews.ExperimentOverview, names: SecretNames) -> Json:
    return {
        "id": row.id,
        "name": row.name,
        "description": row.description,
        "state": _state(row),
        "user": row.username,
        "labels": orjson.loads(row.labels),
        "projectId": row.project_id,
        "project": row.project_name,
        "workspace": row.workspace_name,
        "searcher": row.searcher_type,
        "metric": row.searcher_metric,
        "smallerIsBetter": bool(row.smaller_is_better),
        "bestTrial": row.best_trial_id,
        "best": finite(row.best_metric),
        "progress": row.progress,
        "slots": row.slots_per_trial,
        "start": format_us(row.start_us),
        "end": time_or_none(row.end_us),
        "reason": row.end_reason or "",
        "archived": bool(row.archived),
        "parent": row.parent_id,
        "unmanaged": bool(row.unmanaged),
        "priority": row.priority,
        "trials": row.num_trials,
        "checkpointBytes": row.checkpoint_size,
        "hyperparameters": shown_config(row.hyperparameters, names) if row.hyperparameters else {},
    }


def trial_json(row: overviews.TrialOverview, names: SecretNames) -> Json:
    return {
        "id": row.id,
        "experiment": row.experiment_id,
        "state": _state(row),
        "hparams": shown_config(row.hparams, names),
        "progress": row.progress,
        "batches": row.total_batches,
        "restarts": row.restarts,
        "runs": row.run_id,
        "start": format_us(row.start_us),
        "end": time_or_none(row.end_us),
        "best": finite(row.best),
        "bestBatch": row.best_steps,
        "latest": finite(row.latest),
        "latestBatch": row.latest_steps,
        "checkpoints": row.checkpoint_count,
        "checkpointBytes": row.checkpoint_size,
        "bestCheckpoint": row.best_checkpoint_uuid,
        "stoppedBySearcher": bool(row.is_stopped_by_searcher),
        "earlyExit": row.early_exit,
        "warmStart": row.warm_start_uuid,
        "slots": len(orjson.loads(row.slots)) if row.slots else 0,
    }


def metrics_json(found: list[tuple[str, str]]) -> Json:
    """Return metric names by group; ``more`` if truncated."""
    groups: dict[str, list[str]] = {}
    for group, name in found[: overviews.MAX_METRICS]:
        groups.setdefault(group, []).append(name)
    return {"groups": groups, "more": len(found) > overviews.MAX_METRICS}


async def get_session(request: ApiRequest) -> Json:
    services = request.services
    return {
        "user": request.user.username,
        "isAdmin": bool(request.user.admin),
        "cluster": services.agent_id,
        "pool": services.settings.pool_name,
        "slots": len(services.slots),
        "master": services.master_id,
        "damage": services.describe_trouble(),
        "now": format_us(now_us()),
    }


async def get_experiments(request: ApiRequest) -> Json:
    services, ids = request.services, request.query_ints("ids")

    def read(connection: Connection) -> list[Json]:
        """Build the response in the reader thread, not in the event loop."""
        return [_experiment(row, services.secret_names) for row in overviews.experiments(connection, ids)]

    return {"experiments": await services.read(read), "now": format_us(now_us())}


def _sparklines(connection: Connection, ids: list[int]) -> Json:
    found: dict[str, Any] = {}
    for row in overviews.experiments(connection, ids):
        if row.best_trial_id is not None:
            steps, _, values = curves.curve(connection, row.best_trial_id, "validation", row.searcher_metric)
            kept = [idx for idx in downsample(steps, values, _SPARK_POINTS) if values[idx] - values[idx] == 0]
            found[str(row.id)] = [[steps[idx] for idx in kept], [values[idx] for idx in kept]]
    return found


async def get_sparklines(request: ApiRequest) -> Json:
    """Return the searcher metric of experiments' best trials, downsampled."""
    ids = request.query_ints("ids")[:200]
    return {"sparklines": await request.services.read(_sparklines, ids) if ids else {}}


def _read_experiment(services: Services, connection: Connection, experiment_id: int) -> Json:
    names = services.secret_names
    found = overviews.experiments(connection, [experiment_id])
    if not found:
        raise RequestError(404, f"experiment {experiment_id} is not found; expected one of the list.")
    row = experiments.require(connection, experiment_id)
    config = json.loads(masked_json(row.config, names))
    return {
        "experiment": {
            **_experiment(found[0], names),
            "config": as_data(config),
            "originalConfig": as_data(masked_yaml(row.original_config, names)),
            "notes": row.notes,
            "jobId": row.job_id,
        },
        "metrics": metrics_json(overviews.metric_names(connection, experiment_id)),
    }


async def get_experiment(request: ApiRequest) -> Json:
    services = request.services
    found: Json = await services.read(
        lambda connection: _read_experiment(services, connection, request.path_params["experiment_id"])
    )
    return found


async def get_trials(request: ApiRequest) -> Json:
    services, ids = request.services, request.query_ints("ids")
    experiment_id = request.path_params["experiment_id"]

    def read(connection: Connection) -> list[Json]:
        found = overviews.trials(connection, experiment_id, ids)
        return [trial_json(row, services.secret_names) for row in found]

    return {"trials": await services.read(read)}


def _stall(connection: Connection, trial_id: int) -> str:
    """Describe which rank or process stalls a trial; empty if none does."""
    allocation = allocations.live(connection, trial_id)
    found = None if allocation is None else stall_in(Path(allocation.directory))
    return "" if found is None else found[0]


def _read_trial(services: Services, connection: Connection, trial_id: int) -> Json:
    row = overviews.trial(connection, trial_id)
    if row is None:
        raise RequestError(404, f"trial {trial_id} is not found; expected one of an experiment's list.")
    (experiment,) = overviews.experiments(connection, [row.experiment_id])
    return {
        "trial": {
            **trial_json(row, services.secret_names),
            "stall": _stall(connection, trial_id),
            "job": services.backend.job_text(trial_id),
            "recordsPerEpoch": overviews.records_per_epoch(connection, row.experiment_id),
        },
        "experiment": _experiment(experiment, services.secret_names),
        "runs": [
            {
                "run": run.run_id,
                "start": format_us(run.start_us),
                "end": time_or_none(run.end_us),
                "fromBatch": run.steps_at_start,
                "checkpoint": run.checkpoint_uuid,
                "slots": len(run.slots),
                "nodes": services.agent_of(run),
                "reason": run.exit_reason or "",
                "exitCode": run.exit_code,
            }
            for run in overviews.runs(connection, trial_id)
        ],
        "metrics": metrics_json(overviews.metric_names(connection, trial_ids=[trial_id])),
    }


async def get_trial(request: ApiRequest) -> Json:
    services = request.services
    found: Json = await services.read(
        lambda connection: _read_trial(services, connection, request.path_params["trial_id"])
    )
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class _SeriesQuery:
    trials: list[int]
    group: str
    name: str
    points: int
    after: int


def _series(connection: Connection, wanted: _SeriesQuery) -> list[Json]:
    found: list[Json] = []
    for trial_id in wanted.trials:
        steps, times, values = curves.curve(
            connection, trial_id, wanted.group, wanted.name, after=wanted.after
        )
        kept = downsample(steps, values, wanted.points)
        found.append(
            {
                "trial": trial_id,
                "batches": [steps[idx] for idx in kept],
                "times": [times[idx] // 1000 for idx in kept],
                "values": [finite(values[idx]) for idx in kept],
                "points": len(steps),
            }
        )
    return found


async def get_series(request: ApiRequest) -> Json:
    """Return curves of a metric, one per trial; query ``points``, ``after`` optional.

    ``batches``, ``times`` (milliseconds since the epoch) and ``values`` have an item per kept point; ``points`` is the number
    before downsampling. Non-finite values are strings. ``after`` skips points up to that batch.
    """
    trials = request.query_ints("trials")
    if not 1 <= len(trials) <= _MAX_TRIALS:
        raise RequestError(
            400, f"trials names {len(trials)} trials; expected 1 to {_MAX_TRIALS}. Ask for fewer at a time."
        )
    group, name = request.query("group"), request.query("name")
    if not group or name is None:
        raise RequestError(
            400,
            "group or name is missing; expected those of a metric. Send the names that the experiment tells.",
        )
    points = min(request.query_int("points") or MAX_POINTS, MAX_POINTS, _MAX_SERIES_POINTS // len(trials))
    after = request.query_int("after")
    wanted = _SeriesQuery(trials, group, name, max(points, 2), -1 if after is None else after)
    return {"series": await request.services.read(_series, wanted)}


async def get_names(request: ApiRequest) -> Json:
    """Return the metric names of some trials, optionally filtered by ``text``."""
    found = await request.services.read(
        lambda connection: overviews.metric_names(
            connection, trial_ids=request.query_ints("trials"), text=(request.query("text") or "")[:200]
        )
    )
    return metrics_json(found)


routes = [
    route("GET", "//page/session", get_session, access=USER),
    route("GET", "//page/experiments", get_experiments, access=USER),
    route("GET", "//page/experiments/{experiment_id:int}", get_experiment, access=USER),
    route("GET", "//page/experiments/{experiment_id:int}/trials", get_trials, access=USER),
    route("GET", "//page/sparklines", get_sparklines, access=USER),
    route("GET", "//page/trials/{trial_id:int}", get_trial, access=USER),
    route("GET", "//page/series", get_series, access=USER),
    route("GET", "//page/metrics", get_names, access=USER),
]
