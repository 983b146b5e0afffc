"""System metrics of trials: which series there are, and their readings.

Both are streams.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, TypeVar

from determined.common.api import bindings

from dstrial.master.clock import format_us, now_us
from dstrial.master.http.messages import message
from dstrial.master.http.router import TRIAL, ApiRequest, route
from dstrial.master.http.streams import NdjsonResponse, ndjson
from dstrial.master.services import Services
from dstrial.master.store import tasks
from dstrial.master.store import trials as trial_rows
from dstrial.master.store.database import Connection
from dstrial.master.store.reports import metrics, system_metrics
from dstrial.master.store.reports.system_metrics import Labels, Series

T = TypeVar("T")

_KINDS = bindings.TrialProfilerMetricLabelsProfilerMetricType
_SYSTEM = _KINDS.SYSTEM.value
_FOLLOW_WAIT_S = 30.0


async def stream_metrics(request: ApiRequest) -> NdjsonResponse:
    """``GET trials/{id}/profiler/metrics``: readings of a trial.

    There is a message for each series of each part of the stream. ``follow`` goes on until the trial has ended.
    """
    trial_id = request.path_params["trial_id"]
    await request.services.read(trial_rows.require, trial_id)
    kind = request.query_choice("labels.metricType", _KINDS)
    wanted = Labels(
        name=request.query("labels.name") or "",
        agent_id=request.query("labels.agentId") or "",
        gpu_uuid=request.query("labels.gpuUuid") or "",
    )
    follows = bool(request.query_flag("follow"))
    if kind not in (None, _SYSTEM, _KINDS.UNSPECIFIED.value):
        return ndjson(_nothing())  # times of parts of a batch, which profilers of older releases had
    return ndjson(_batches(request.services, trial_id, wanted, follows=follows))


async def stream_series(request: ApiRequest) -> NdjsonResponse:
    """``GET trials/{id}/profiler/available_series``: the labels of all series.

    With ``follow`` they are sent again whenever there are more, until the trial has ended.
    """
    trial_id = request.path_params["trial_id"]
    await request.services.read(trial_rows.require, trial_id)
    return ndjson(_series(request.services, trial_id, follows=bool(request.query_flag("follow"))))


async def _nothing() -> AsyncIterator[list[dict[str, Any]]]:
    yield []


async def _batches(
    services: Services, trial_id: int, wanted: Labels, *, follows: bool
) -> AsyncIterator[list[dict[str, Any]]]:
    def made(rows: list[metrics.Report]) -> list[dict[str, Any]]:
        found: dict[Series, list[tuple[int, float]]] = {}
        for row in rows:
            for series, number in system_metrics.readings(row.group_name, json.loads(row.metrics)):
                if wanted.fit(series):
                    found.setdefault(series, []).append((row.end_us, number))
        return [_batch_json(trial_id, series, read) for series, read in found.items()]

    async for batch, _ in _parts(services, trial_id, made, follows=follows):
        yield batch


def _series_of(rows: list[metrics.Report]) -> set[Series]:
    return {
        series
        for row in rows
        for series, _ in system_metrics.readings(row.group_name, json.loads(row.metrics))
    }


async def _series(services: Services, trial_id: int, *, follows: bool) -> AsyncIterator[dict[str, Any]]:
    known: set[Series] = set()
    num_told = -1
    async for found, is_last in _parts(services, trial_id, _series_of, follows=follows):
        known.update(found)
        if is_last and len(known) > num_told:
            num_told = len(known)
            labels = [_labels_json(trial_id, series) for series in sorted(known)]
            yield message(bindings.v1GetTrialProfilerAvailableSeriesResponse, labels=labels)


async def _parts(
    services: Services, trial_id: int, make: Callable[[list[metrics.Report]], T], *, follows: bool
) -> AsyncIterator[tuple[T, bool]]:
    """Yield what is made of a trial's reports of system metrics, in parts.

    With each part, whether it is the last for now. It is made where it is read, and not in the loop, which others wait for.
    """

    def read(connection: Connection, ids: list[int]) -> tuple[int, T]:
        rows = metrics.some_reports(connection, ids)
        return rows[-1].id if rows else ids[-1], make(rows)

    topic, after_id = f"trial:{trial_id}", 0
    while True:
        seen = services.pubsub.version(topic)
        is_over = not follows or await services.read(_is_over, trial_id)
        ids = await services.read(system_metrics.report_ids, trial_id, after_id)
        if not ids:
            yield make([]), True
        while ids:
            after_id, made = await services.read(read, ids)
            ids = [report_id for report_id in ids if report_id > after_id]
            yield made, not ids
        if is_over:
            return
        await services.pubsub.wait(topic, seen, _FOLLOW_WAIT_S)


def _is_over(connection: Connection, trial_id: int) -> bool:
    return tasks.is_over(connection, trial_id, None, now_us())


def _labels_json(trial_id: int, series: Series) -> dict[str, Any]:
    return message(
        bindings.v1TrialProfilerMetricLabels,
        trialId=trial_id,
        name=series.name,
        agentId=series.agent_id,
        gpuUuid=series.gpu_uuid,
        metricType=_SYSTEM,
    )


def _batch_json(trial_id: int, series: Series, read: Iterable[tuple[int, float]]) -> dict[str, Any]:
    pairs = list(read)
    batch = message(
        bindings.v1TrialProfilerMetricsBatch,
        labels=_labels_json(trial_id, series),
        timestamps=[format_us(end_us) for end_us, _ in pairs],
        values=[number for _, number in pairs],
        batches=[],  # System metrics belong to no batch; Determined 0.38.1 sends none either.
    )
    return message(bindings.v1GetTrialProfilerMetricsResponse, batch=batch)


routes = [
    route("GET", "/trials/{trial_id:int}/profiler/metrics", stream_metrics, access=TRIAL),
    route("GET", "/trials/{trial_id:int}/profiler/available_series", stream_series, access=TRIAL),
]
