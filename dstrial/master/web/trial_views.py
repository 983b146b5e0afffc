"""Routes of the web page's views of a trial's ranks, and of compared trials."""

from __future__ import annotations

import math

from dstrial.errors import RequestError
from dstrial.master.clock import format_us
from dstrial.master.http.router import USER, ApiRequest, route
from dstrial.master.services import Services
from dstrial.master.store.database import Connection
from dstrial.master.store.reports import curves as rows
from dstrial.master.store.views import overviews
from dstrial.master.store.views.overviews import Json, finite
from dstrial.master.web.views import MAX_POINTS, curve_json, metrics_json, read_trials, require_trial

MAX_COMPARED = 100  # compared trials per response
MAX_RANKS = 64  # curves (one per rank) per response


def _newest(connection: Connection, trial_id: int) -> Json:
    require_trial(connection, trial_id)
    found = rows.newest(connection, trial_id)
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
    return await request.services.read(_newest, request.path_params["trial_id"])


def _rank_curves(connection: Connection, trial_id: int, name: str) -> Json:
    require_trial(connection, trial_id)
    steps, times, values = rows.by_rank(connection, trial_id, name)
    num_ranks = max(map(len, values), default=0)
    shown = list(range(num_ranks))
    if num_ranks > MAX_RANKS:
        # Users look for outliers, so show the ranks with the largest latest values.
        newest = [-math.inf if value is None or math.isnan(value) else value for value in values[-1]]
        shown = sorted(sorted(range(len(newest)), key=newest.__getitem__, reverse=True)[:MAX_RANKS])
    return _curves(steps, times, values, shown, num_ranks)


def _curves(
    steps: list[int], times: list[int], values: list[list[float | None]], ranks: list[int], num_ranks: int
) -> Json:
    curves = []
    for rank in ranks:
        own = [
            (at, row[rank])
            for at, row in enumerate(values)
            if rank < len(row) and row[rank] is not None  # the number of ranks may differ between runs
        ]
        ys = [float(value) for _, value in own if value is not None]
        curve = curve_json([steps[at] for at, _ in own], [times[at] for at, _ in own], ys, MAX_POINTS)
        curves.append({"rank": rank, **curve})
    return {"curves": curves, "ranks": num_ranks}


async def get_rank_curves(request: ApiRequest) -> Json:
    """Return the curves of an instrument (telemetry metric), one per rank.

    With more than 64 ranks, only those with the largest latest values have curves. ``ranks`` is the number of ranks.
    """
    name = request.query("name")
    if not name:
        raise RequestError(400, "name is missing; expected an instrument's. Send one of the newest report's.")
    return await request.services.read(_rank_curves, request.path_params["trial_id"], name)


def _compared_experiment(connection: Connection, experiment_id: int) -> Json:
    (line,) = overviews.experiments(connection, [experiment_id])
    return {
        **{name: line[name] for name in ("id", "name", "metric", "smallerIsBetter", "bestTrial")},
        "recordsPerEpoch": overviews.records_per_epoch(connection, experiment_id),
    }


def _compared(
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
    """Return the given trials, and the best trial of each given experiment."""
    trials, found = request.query_ints("trials"), request.query_ints("experiments")
    if not 1 <= len(trials) + len(found) <= MAX_COMPARED:
        raise RequestError(
            400,
            f"{len(trials) + len(found)} trials and experiments are named; expected 1 to {MAX_COMPARED}. Choose fewer.",
        )
    services = request.services
    return await services.read(lambda connection: _compared(services, connection, trials, found))


routes = [
    route("GET", "//page/trials/{trial_id:int}/instruments", get_instruments, access=USER),
    route("GET", "//page/trials/{trial_id:int}/instruments/series", get_rank_curves, access=USER),
    route("GET", "//page/compare", get_compared, access=USER),
]
