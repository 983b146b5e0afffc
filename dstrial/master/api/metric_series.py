"""Series of metrics that charts draw.

They are of chosen trials, and of an experiment's as it goes on.
"""

from __future__ import annotations

import asyncio
import operator
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeAlias

from determined.common.api import bindings

from dstrial.errors import RequestError
from dstrial.master.clock import format_us, now_us, parse_time
from dstrial.master.http.messages import message
from dstrial.master.http.router import TRIAL, USER, ApiRequest, route
from dstrial.master.http.serializers import as_data, shown_config, trial_json
from dstrial.master.http.streams import NdjsonResponse, ndjson
from dstrial.master.services import Services
from dstrial.master.store import experiments as experiment_rows
from dstrial.master.store import trials as trial_rows
from dstrial.master.store.database import Connection
from dstrial.master.store.reports import series
from dstrial.master.store.reports.metric_values import plain
from dstrial.master.store.views import listings

_MAX_TRIALS = 1000
_MAX_ALL_POINTS = 200_000
"""Most points of one answer; of more series each has fewer."""

_DEFAULT_POINTS = 200
_DEFAULT_SAMPLE_POINTS = 1000
_DEFAULT_SAMPLE_TRIALS = 25
_DEFAULT_PERIOD_S = 30
_MAX_PERIOD_S = 3600
_TRIALS_AT_ONCE = 100
_BATCHES_AT_ONCE = 10_000
# Their trials train for different lengths, and those that were kept longest are the best.
_EARLY_STOPPING = ("adaptive_asha", "async_halving")

_Wanted: TypeAlias = "Callable[[int, int, float | None, float | None], bool]"
_Test: TypeAlias = "Callable[[float], bool]"


async def compare_trials(request: ApiRequest) -> dict[str, Any]:
    """``GET trials/time-series``: chosen metrics of chosen trials, reduced."""
    trial_ids = list(dict.fromkeys(request.query_ints("trialIds")))
    if len(trial_ids) > _MAX_TRIALS:
        raise RequestError(
            400, f"trialIds names {len(trial_ids)} trials; expected at most {_MAX_TRIALS}. Name fewer."
        )
    groups = _groups(request)
    window = _window(request)
    max_points = _max_points(
        request, _DEFAULT_POINTS, len(trial_ids) * sum(len(names) for names in groups.values())
    )
    for trial_id in trial_ids:
        request.require_trial(trial_id)
    names = request.services.secret_names

    def read(connection: Connection, trial_id: int) -> dict[str, Any]:
        trial_rows.require(connection, trial_id)
        (row,) = listings.list_trials(connection, now_us=now_us(), trial_id=trial_id)
        found = {
            group: series.points(connection, trial_id, group, chosen, max_points, window)
            for group, chosen in groups.items()
        }
        return message(
            bindings.v1ComparableTrial,
            trial=trial_json(row, names),
            metrics=[
                message(
                    bindings.v1DownsampledMetrics,
                    data=_data(points),
                    group=as_data(group),
                    type=_type_of(group),
                )
                for group, points in found.items()
                if points
            ],
        )

    async def compare() -> list[dict[str, Any]]:
        return [await request.services.read(read, trial_id) for trial_id in trial_ids]

    return message(bindings.v1CompareTrialsResponse, trials=await request.unless_gone(compare()))


def _groups(request: ApiRequest) -> dict[str, list[str]]:
    """Return the names of each group that a query asks for.

    Raises:
        RequestError: an id is none, names come without a group, or there are too many.
    """
    groups: dict[str, list[str]] = {}
    for metric_id in request.queries("metricIds"):
        group, dot, name = metric_id.partition(".")
        if not (group and dot and name):
            raise request.wrong_query("metricIds", "GROUP.NAME of each metric")
        groups.setdefault(group, []).append(name)
    names = request.queries("metricNames")
    if names:
        groups.setdefault(_group(request), []).extend(names)
    unique = {group: list(dict.fromkeys(chosen)) for group, chosen in groups.items()}
    count = sum(len(chosen) for chosen in unique.values())
    if count > series.MAX_NAMES:
        raise RequestError(
            400, f"the query names {count} metrics; expected at most {series.MAX_NAMES}. Name fewer."
        )
    return unique


def _group(request: ApiRequest) -> str:
    """Return the group of a query, which older clients name by its type.

    Raises:
        RequestError: it names none.
    """
    kind = request.query_choice("metricType", bindings.v1MetricType)
    group = request.query("group")
    if group:
        return group
    if kind is None or kind == bindings.v1MetricType.UNSPECIFIED.value:
        raise request.wrong_query("group", "the group of the metric, training or validation for example")
    return kind.removeprefix("METRIC_TYPE_").lower()


def _type_of(group: str) -> str:
    known = {"training": bindings.v1MetricType.TRAINING, "validation": bindings.v1MetricType.VALIDATION}
    return str(known.get(group, bindings.v1MetricType.UNSPECIFIED).value)


def _max_points(request: ApiRequest, default: int, num_series: int) -> int:
    """Return how many points each series of an answer may have."""
    asked = _count(request, "maxDatapoints") or default
    return max(min(asked, series.MAX_POINTS, _MAX_ALL_POINTS // max(num_series, 1)), 2)


def _count(request: ApiRequest, name: str) -> int:
    """Return a number of the query that is not negative, 0 without one."""
    value = request.query_int(name) or 0
    if value < 0:
        raise request.wrong_query(name, "a number of at least 0")
    return value


def _window(request: ApiRequest) -> series.Window:
    first, last = _count(request, "startBatches"), _count(request, "endBatches")
    filter_name, is_wanted = _filter(request)
    return series.Window(first, last or None, filter_name, is_wanted)


_COMPARISONS = {"gt": operator.gt, "gte": operator.ge, "lt": operator.lt, "lte": operator.le}


def _filter(request: ApiRequest) -> tuple[str | None, _Wanted | None]:
    """Return what a ``timeSeriesFilter`` wants.

    That is a metric to be read with each point, and the test.

    Raises:
        RequestError: it has a range and no name, or a bound is no number or time.
    """
    name = request.query("timeSeriesFilter.name") or ""
    of_numbers = [*_bounds(request, "doubleRange", _number), *_bounds(request, "integerRange", _number)]
    chosen = request.query_ints("timeSeriesFilter.integerRange.incl")
    refused = request.query_ints("timeSeriesFilter.integerRange.notIn")
    if chosen:
        of_numbers.append(lambda value: value in chosen)
    if refused:
        of_numbers.append(lambda value: value not in refused)
    of_times = _bounds(request, "timeRange", _time)
    if not of_numbers and not of_times:
        return None, None
    if not name:
        raise request.wrong_query(
            "timeSeriesFilter.name", "batches, time, epoch, or a metric, beside a range"
        )
    if (name == "time") != bool(of_times) or (of_times and of_numbers):
        raise request.wrong_query("timeSeriesFilter.name", "time with a timeRange, others with numbers")
    tests = of_times or of_numbers

    def passes(value: float | None) -> bool:
        return value is not None and all(test(value) for test in tests)

    if name == "batches":
        return None, lambda steps, _end_us, _epoch, _value: passes(steps)
    if name == "time":
        return None, lambda _steps, end_us, _epoch, _value: passes(end_us)
    if name == "epoch":
        return None, lambda _steps, _end_us, epoch, _value: passes(epoch)
    return name, lambda _steps, _end_us, _epoch, value: passes(value)


def _bounds(request: ApiRequest, kind: str, parse: Callable[[ApiRequest, str, str], float]) -> list[_Test]:
    found: list[_Test] = []
    for word, compare in _COMPARISONS.items():
        name = f"timeSeriesFilter.{kind}.{word}"
        text = request.query(name)
        if text is not None:
            bound = parse(request, name, text)
            found.append(lambda value, compare=compare, bound=bound: bool(compare(value, bound)))  # type: ignore[misc]  # the defaults bind
    return found


def _number(request: ApiRequest, name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise request.wrong_query(name, "a number") from error


def _time(request: ApiRequest, name: str, text: str) -> float:
    try:
        return parse_time(text)
    except (ValueError, OverflowError) as error:
        raise request.wrong_query(name, "a time such as 2026-01-31T00:00:00Z") from error


def _data(points: Sequence[series.Point]) -> Any:
    """Return points as a list of ``v1DataPoint``, written already.

    The loop is not to do it for thousands.
    """
    return as_data(
        [
            {
                "batches": point.steps,
                "time": format_us(point.end_us),
                "epoch": None if point.epoch is None else plain({"epoch": point.epoch})["epoch"],
                "values": plain(point.values),
            }
            for point in points
        ]
    )


async def _followed(
    services: Services,
    experiment_id: int,
    period_s: int,
    look: Callable[[bool], Awaitable[Sequence[dict[str, Any]]]],
) -> AsyncIterator[Sequence[dict[str, Any]]]:
    """Yield what ``look`` finds, until the experiment has ended.

    It looks again after each period. ``look`` is told whether it is asked for the last time.
    """
    while True:
        row = await services.read(experiment_rows.require, experiment_id)
        is_over = row.end_us is not None
        yield await look(is_over)
        if is_over:
            return
        await asyncio.sleep(period_s)


async def _asked(request: ApiRequest) -> tuple[experiment_rows.Experiment, str, str, int]:
    """Return what a stream is asked for: experiment, group, metric and period.

    The period is in seconds.
    """
    name = request.query("metricName")
    if not name:
        raise request.wrong_query("metricName", "the name of a metric")
    group = _group(request)
    period_s = min(_count(request, "periodSeconds") or _DEFAULT_PERIOD_S, _MAX_PERIOD_S)
    experiment = await request.services.read(experiment_rows.require, request.path_params["experiment_id"])
    return experiment, group, name, period_s


async def _chunks(services: Services, experiment_id: int) -> list[list[int]]:
    ids = await services.read(trial_rows.ids_of, experiment_id)
    return [ids[start : start + _TRIALS_AT_ONCE] for start in range(0, len(ids), _TRIALS_AT_ONCE)]


async def stream_batches(request: ApiRequest) -> NdjsonResponse:
    """``GET …/metrics-stream/batches``: at which batches a metric was reported.

    Each batch is told once.
    """
    experiment, group, name, period_s = await _asked(request)
    services = request.services
    sent: set[int] = set()
    after_id: int | None = None

    async def look(is_last: bool) -> list[dict[str, Any]]:
        nonlocal after_id
        latest = await services.read(series.last_report_id)
        # A metric may have been added to a report that was seen without it: in the end all are looked at again.
        from_id = 0 if is_last or after_id is None else after_id
        found: set[int] = set()
        for ids in await _chunks(services, experiment.id):
            found |= await services.read(series.batches, ids, group, name, from_id)
        new = sorted(found - sent)
        is_first = after_id is None
        sent.update(new)
        after_id = latest
        if not new and not is_first:
            return []
        return [
            message(bindings.v1MetricBatchesResponse, batches=new[start : start + _BATCHES_AT_ONCE])
            for start in range(0, max(len(new), 1), _BATCHES_AT_ONCE)
        ]

    return ndjson(_followed(services, experiment.id, period_s, look))


async def stream_sample(request: ApiRequest) -> NdjsonResponse:
    """``GET …/metrics-stream/trials-sample``: best trials, then what is new."""
    experiment, group, name, period_s = await _asked(request)
    services = request.services
    max_trials = min(_count(request, "maxTrials") or _DEFAULT_SAMPLE_TRIALS, _MAX_TRIALS)
    max_points = _max_points(request, _DEFAULT_SAMPLE_POINTS, max_trials)
    window = _window(request)
    sent: dict[int, int] = {}  # Trial -> last batch that was sent.

    def read(connection: Connection, trial_id: int) -> tuple[Any, list[series.Point]]:
        first = max(window.first, sent.get(trial_id, -1) + 1)
        points = series.points(
            connection, trial_id, group, [name], max_points, series.Window(first, window.last)
        )
        return trial_rows.require(connection, trial_id).hparams, points

    is_first = True

    async def look(_is_last: bool) -> list[dict[str, Any]]:
        nonlocal is_first
        best = await services.read(
            series.best_trials,
            experiment.id,
            group,
            name,
            max_trials,
            smaller_is_better=experiment.smaller_is_better,
            longest_first=experiment.searcher_type in _EARLY_STOPPING,
        )
        promoted, demoted = [one for one in best if one not in sent], sorted(sent.keys() - set(best))
        for trial_id in demoted:
            del sent[trial_id]
        trials = []
        for trial_id in best:
            hparams, points = await services.read(read, trial_id)
            if points or trial_id in promoted:
                trials.append(
                    message(
                        bindings.v1TrialsSampleResponseTrial,
                        trialId=trial_id,
                        hparams=shown_config(hparams, services.secret_names),
                        data=_data(points),
                    )
                )
            sent[trial_id] = points[-1].steps if points else sent.get(trial_id, -1)
        if not (is_first or trials or demoted):
            return []
        is_first = False
        return [
            message(
                bindings.v1TrialsSampleResponse,
                trials=trials,
                promotedTrials=promoted,
                demotedTrials=demoted,
            )
        ]

    return ndjson(_followed(services, experiment.id, period_s, look))


async def stream_snapshot(request: ApiRequest) -> NdjsonResponse:
    """``GET …/metrics-stream/trials-snapshot``: all trials near one batch.

    A metric of theirs is told when it changes.
    """
    experiment, group, name, period_s = await _asked(request)
    services = request.services
    steps = request.query_int("batchesProcessed")
    if steps is None or steps < 0:
        raise request.wrong_query("batchesProcessed", "a number of at least 0")
    margin = _count(request, "batchesMargin")
    sent: dict[int, tuple[int, str]] | None = None

    async def look(_is_last: bool) -> list[dict[str, Any]]:
        nonlocal sent
        found: dict[int, tuple[int, float]] = {}
        for ids in await _chunks(services, experiment.id):
            found |= await services.read(series.nearest, ids, group, name, steps, margin)
        # As text: NaN is not equal to itself.
        seen = {trial_id: (at, str(value)) for trial_id, (at, value) in found.items()}
        if seen == sent:
            return []
        sent = seen
        hparams = await services.read(trial_rows.hparams_of, experiment.id)
        return [
            message(
                bindings.v1TrialsSnapshotResponse,
                trials=[
                    message(
                        bindings.v1TrialsSnapshotResponseTrial,
                        trialId=trial_id,
                        hparams=shown_config(hparams[trial_id], services.secret_names),
                        batchesProcessed=at,
                        metric=plain({"metric": value})["metric"],
                    )
                    for trial_id, (at, value) in sorted(found.items())
                    if trial_id in hparams  # Its experiment may have been deleted meanwhile.
                ],
            )
        ]

    return ndjson(_followed(services, experiment.id, period_s, look))


_STREAM = "/experiments/{experiment_id:int}/metrics-stream"
routes = [
    route("GET", "/trials/time-series", compare_trials, access=TRIAL),
    route("GET", f"{_STREAM}/batches", stream_batches, access=USER),
    route("GET", f"{_STREAM}/trials-sample", stream_sample, access=USER),
    route("GET", f"{_STREAM}/trials-snapshot", stream_snapshot, access=USER),
]
