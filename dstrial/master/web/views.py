"""Routes of the web page's lists and charts; each reads in one transaction."""

from __future__ import annotations

import json
from pathlib import Path

from dstrial.config.secrets import SecretNames, masked_json, masked_yaml
from dstrial.errors import RequestError
from dstrial.master.clock import format_us
from dstrial.master.http.router import USER, ApiRequest, route
from dstrial.master.http.serializers import as_data, shown_config, time_or_none
from dstrial.master.services import Services
from dstrial.master.store import allocations, experiments
from dstrial.master.store.database import Connection
from dstrial.master.store.reports import curves
from dstrial.master.store.reports.metric_summaries import finite
from dstrial.master.store.views import overviews
from dstrial.master.store.views.observe import stall_in
from dstrial.master.store.views.overviews import Json

MAX_POINTS = 2000  # per curve
_MAX_SERIES_POINTS = 400_000  # per response, over all curves
_MAX_TRIALS = 1000  # curves per response
MAX_COMPARED = 100  # compared trials per response


def masked_rows(rows: list[Json], name: str, names: SecretNames) -> list[Json]:
    """Return rows in which field ``name``, a config as JSON text, has masked secrets."""
    return [{**row, name: shown_config(row[name], names)} for row in rows]


def _read_experiments(connection: Connection, services: Services, ids: list[int]) -> list[Json]:
    return masked_rows(overviews.experiments(connection, ids), "hyperparameters", services.secret_names)


def read_trials(
    connection: Connection, services: Services, ids: list[int], experiment_id: int | None = None
) -> list[Json]:
    return masked_rows(overviews.trials(connection, ids, experiment_id), "hparams", services.secret_names)


def metrics_json(found: list[tuple[str, str]]) -> Json:
    """Return metrics as JSON: ``groups`` maps group -> names.

    ``found`` are (group, name) pairs. ``more`` in the result is true if pairs beyond ``MAX_METRICS`` are left out.
    """
    groups: dict[str, list[str]] = {}
    for group, name in found[: overviews.MAX_METRICS]:
        groups.setdefault(group, []).append(name)
    return {"groups": groups, "more": len(found) > overviews.MAX_METRICS}


async def get_session(request: ApiRequest) -> Json:
    services = request.services
    return {
        "user": request.user.username,
        "cluster": services.agent_id,
        "slots": len(services.slots),
        "damage": services.describe_trouble(),
    }


async def get_experiments(request: ApiRequest) -> Json:
    services, ids = request.services, request.query_ints("ids")
    return {"experiments": await services.read(_read_experiments, services, ids)}


def _read_experiment(connection: Connection, services: Services, experiment_id: int) -> Json:
    names = services.secret_names
    found = _read_experiments(connection, services, [experiment_id])
    if not found:
        raise RequestError(404, f"experiment {experiment_id} is not found; expected one of the list.")
    row = experiments.require(connection, experiment_id)
    config = json.loads(masked_json(row.config, names))
    return {
        "experiment": {
            **found[0],
            "config": as_data(config),
            "originalConfig": as_data(masked_yaml(row.original_config, names)),
            "notes": row.notes,
            "jobId": row.job_id,
        },
        "metrics": metrics_json(overviews.metric_names(connection, experiment_id)),
    }


async def get_experiment(request: ApiRequest) -> Json:
    services = request.services
    return await services.read(_read_experiment, services, request.path_params["experiment_id"])


async def get_trials(request: ApiRequest) -> Json:
    services, ids = request.services, request.query_ints("ids")
    return {"trials": await services.read(read_trials, services, ids, request.path_params["experiment_id"])}


def _stall_text(connection: Connection, trial_id: int) -> str:
    """Return text on the rank or process that stalls a trial; empty if none does."""
    allocation = allocations.live(connection, trial_id)
    found = None if allocation is None else stall_in(Path(allocation.directory))
    return "" if found is None else found[0]


def require_trial(connection: Connection, trial_id: int) -> int:
    """Return the id of a trial's experiment; raise HTTP 404 if there is no such trial."""
    found = overviews.experiment_of_trial(connection, trial_id)
    if found is None:
        raise RequestError(404, f"trial {trial_id} is not found; expected one of an experiment's list.")
    return found


def _read_trial(connection: Connection, services: Services, trial_id: int) -> Json:
    experiment_id = require_trial(connection, trial_id)
    (trial,) = read_trials(connection, services, [trial_id])
    (experiment,) = _read_experiments(connection, services, [experiment_id])
    return {
        "trial": {
            **trial,
            "stall": _stall_text(connection, trial_id),
            "job": services.backend.job_text(trial_id),
            "recordsPerEpoch": overviews.records_per_epoch(connection, experiment_id),
        },
        "experiment": experiment,
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
    return await services.read(_read_trial, services, request.path_params["trial_id"])


def curve_json(steps: list[int], times: list[int], values: list[float], num_points: int) -> Json:
    """Return a metric's curve as JSON with at most ``num_points`` points.

    ``steps`` are completed batches. The argument ``times`` is in microseconds, "times" of the JSON in milliseconds.
    """
    kept = curves.downsample(values, num_points)
    return {
        "batches": [steps[idx] for idx in kept],
        "times": [times[idx] // 1000 for idx in kept],
        "values": [finite(values[idx]) for idx in kept],
    }


def _read_series(
    connection: Connection, trial_ids: list[int], group: str, name: str, points: int
) -> list[Json]:
    found: list[Json] = []
    for trial_id in trial_ids:
        curve = curves.curve(connection, trial_id, group, name)
        found.append({"trial": trial_id, **curve_json(*curve, points), "points": len(curve[0])})
    return found


async def get_series(request: ApiRequest) -> Json:
    """Return downsampled curves of a metric, one per trial.

    ``batches``, ``times`` (milliseconds since the epoch) and ``values`` have an item for each point. ``points`` is the number
    of points before downsampling. Non-finite values are strings.
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
    return {"series": await request.services.read(_read_series, trials, group, name, max(points, 2))}


def _read_newest_report(connection: Connection, trial_id: int) -> Json:
    require_trial(connection, trial_id)
    found = curves.newest(connection, trial_id)
    if found is None:
        return {"report": None}
    return {
        "report": {
            "batches": found.steps,
            "time": format_us(found.end_us),
            "run": found.run_id,
            "values": {name: finite(value) for name, value in found.values.items()},
            "ranks": {name: [finite(value) for value in ranks] for name, ranks in found.ranks.items()},
        }
    }


async def get_instruments(request: ApiRequest) -> Json:
    return await request.services.read(_read_newest_report, request.path_params["trial_id"])


def _compared_experiment(connection: Connection, experiment_id: int) -> Json:
    (line,) = overviews.experiments(connection, [experiment_id])
    return {
        **{name: line[name] for name in ("id", "name", "metric", "smallerIsBetter", "bestTrial")},
        "recordsPerEpoch": overviews.records_per_epoch(connection, experiment_id),
    }


def _read_compared(
    services: Services, connection: Connection, trial_ids: list[int], experiment_ids: list[int]
) -> Json:
    named = overviews.experiments(connection, experiment_ids) if experiment_ids else []
    best = {row["id"]: row["bestTrial"] for row in named}
    missing = [f"experiment {one} is not found" for one in experiment_ids if one not in best]
    missing += [f"experiment {one} has no best trial yet" for one, trial in best.items() if trial is None]
    stand_ins = [trial for trial in map(best.get, experiment_ids) if trial is not None]
    wanted = list(dict.fromkeys([*trial_ids, *stand_ins]))
    rows = {row["id"]: row for row in read_trials(connection, services, wanted)}
    missing += [f"trial {one} is not found" for one in wanted if one not in rows]
    shown = [rows[one] for one in wanted if one in rows]
    return {
        "trials": shown,
        "experiments": [
            _compared_experiment(connection, one) for one in dict.fromkeys(row["experiment"] for row in shown)
        ],
        "metrics": metrics_json(overviews.metric_names(connection, trial_ids=[row["id"] for row in shown])),
        "missing": missing,
    }


async def get_compared(request: ApiRequest) -> Json:
    """Return trials to compare, with their experiments and metric names.

    The trials are those in query parameter ``trials``, and the best trial of each experiment in ``experiments``. ``missing``
    lists messages about ids without a trial.
    """
    trials, found = request.query_ints("trials"), request.query_ints("experiments")
    if not 1 <= len(trials) + len(found) <= MAX_COMPARED:
        raise RequestError(
            400,
            f"{len(trials) + len(found)} trials and experiments are named; expected 1 to {MAX_COMPARED}. Choose fewer.",
        )
    services = request.services
    return await services.read(lambda connection: _read_compared(services, connection, trials, found))


routes = [
    route("GET", "//page/session", get_session, access=USER),
    route("GET", "//page/experiments", get_experiments, access=USER),
    route("GET", "//page/experiments/{experiment_id:int}", get_experiment, access=USER),
    route("GET", "//page/experiments/{experiment_id:int}/trials", get_trials, access=USER),
    route("GET", "//page/trials/{trial_id:int}", get_trial, access=USER),
    route("GET", "//page/series", get_series, access=USER),
    route("GET", "//page/trials/{trial_id:int}/instruments", get_instruments, access=USER),
    route("GET", "//page/compare", get_compared, access=USER),
]
