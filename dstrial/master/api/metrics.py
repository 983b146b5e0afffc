"""Metrics: trials report them, streams read them back."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable
from typing import Any

from determined.common.api import bindings

from dstrial.errors import RequestError
from dstrial.master.clock import format_us, now_us, parse_time
from dstrial.master.http.fields import shown
from dstrial.master.http.messages import message
from dstrial.master.http.router import TRIAL, ApiRequest, route
from dstrial.master.http.serializers import stored
from dstrial.master.http.streams import NdjsonResponse, ndjson
from dstrial.master.lifecycle import trials
from dstrial.master.services import Services
from dstrial.master.store import trials as trial_rows
from dstrial.master.store.reports import metrics
from dstrial.master.store.reports.metric_summaries import MAX_NAME_CHARS

_MAX_STEPS = 2**31 - 1


async def report_metrics(request: ApiRequest) -> dict[str, Any]:
    trial_id = request.path_params["trial_id"]
    body = request.body()
    report = body.fields("metrics")
    if report is None:
        raise body.wrong("metrics", "an object")
    group = body.text("group") or "training"
    values = report.fields("metrics")
    given = None if values is None else values.mapping("avgMetrics")
    if values is None or given is None:
        raise report.wrong("metrics", "an object with avgMetrics")
    per_batch = values.items_of("batchMetrics") or []
    if not all(isinstance(of_batch, dict) for of_batch in per_batch):
        raise values.wrong("batchMetrics", "a list of objects")
    run_id = report.required_integer("trialRunId", 0, _MAX_STEPS)
    steps = report.integer("stepsCompleted", 0, _MAX_STEPS)
    end_us = _time(report.text("reportTime"))
    if not group or len(group) > MAX_NAME_CHARS:
        raise RequestError(400, "group is empty or too long; expected a name. Choose another.")
    for name in itertools.chain(given, *per_batch):
        if len(name) > MAX_NAME_CHARS:
            raise RequestError(
                400,
                f"the name of a metric has {len(name):,} characters, {shown(name)}; expected at most {MAX_NAME_CHARS}. Report "
                "it under a shorter name, and a long text as the value.",
            )
    await request.services.write(
        lambda tx: trials.report_metrics(tx, trial_id, run_id, group, steps, end_us, given, per_batch)
    )
    return {}


def _time(text: str | None) -> int:
    if text is None:
        return now_us()
    try:
        return parse_time(text)
    except (ValueError, OverflowError) as error:
        raise RequestError(
            400, f"reportTime is {text[:80]!r}; expected a time. Send 2026-01-31T12:00:00Z."
        ) from error


def _streaming(group: str | None) -> Callable[[ApiRequest], Any]:
    async def handle(request: ApiRequest) -> NdjsonResponse:
        chosen = request.query("group") or "" if group is None else group
        trial_ids = []
        for text in request.queries("trialIds"):
            if not text.isdecimal() or len(text) > 18:
                raise request.wrong_query("trialIds", "whole numbers")
            trial_ids.append(int(text))
        for trial_id in trial_ids:
            request.require_trial(trial_id)
            await request.services.read(trial_rows.require, trial_id)
        return ndjson(_reports(request.services, trial_ids, chosen))

    return handle


async def _reports(services: Services, trial_ids: list[int], group: str) -> AsyncIterator[dict[str, Any]]:
    for trial_id in sorted(set(trial_ids)):
        ids = await services.read(metrics.report_ids, trial_id, group or None)
        while ids:
            rows = await services.read(metrics.some_reports, ids)
            if not rows:
                break
            yield {"metrics": [report_json(row, group or None) for row in rows]}
            ids = ids[ids.index(rows[-1].id) + 1 :]


def report_json(row: metrics.Report, group: str | None) -> dict[str, Any]:
    """Convert a row to ``v1MetricsReport``; the group decides the key of the values."""
    keys = ["validation_metrics" if row.group_name == "validation" else "avg_metrics"]
    if group is None and keys != ["avg_metrics"]:
        keys.append("avg_metrics")
    values = {key: stored(row.metrics) for key in keys}
    if row.per_batch is not None:
        values["batch_metrics"] = stored(row.per_batch)
    return message(
        bindings.v1MetricsReport,
        archived=bool(row.archived),
        endTime=format_us(row.end_us),
        group=row.group_name,
        id=row.id,
        metrics=values,
        totalBatches=max(row.steps, 0),
        trialId=row.trial_id,
        trialRunId=row.run_id,
    )


routes = [
    route("POST", "/trials/{trial_id:int}/metrics", report_metrics, access=TRIAL),
    route("GET", "/trials/metrics/trial_metrics", _streaming(None), access=TRIAL),
    route("GET", "/trials/metrics/training_metrics", _streaming("training"), access=TRIAL),
    route("GET", "/trials/metrics/validation_metrics", _streaming("validation"), access=TRIAL),
]
