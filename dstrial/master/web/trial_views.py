"""Routes of the web page's views of a trial's ranks, and of compared trials."""

from __future__ import annotations

from dstrial.errors import RequestError
from dstrial.master.clock import format_us
from dstrial.master.http.router import USER, ApiRequest, route
from dstrial.master.services import Services
from dstrial.master.store.database import Connection
from dstrial.master.store.reports import curves as rows
from dstrial.master.store.views import overviews
from dstrial.master.store.views.overviews import Json, finite
from dstrial.master.web.views import metrics_json, read_trials, require_trial

MAX_COMPARED = 100  # compared trials per response


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
    route("GET", "//page/compare", get_compared, access=USER),
]
