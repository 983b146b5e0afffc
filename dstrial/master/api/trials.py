"""Routes for trials: list, show, workloads, reports, preemption, kill."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from determined.common.api import bindings

from dstrial.config.secrets import SecretNames
from dstrial.errors import RequestError
from dstrial.master.clock import format_us, now_us, parse_time
from dstrial.master.http.fields import shown
from dstrial.master.http.responses import Stream, message, ndjson
from dstrial.master.http.router import TRIAL, USER, ApiRequest, reads, route, writes
from dstrial.master.http.serializers import (
    as_data,
    checkpoint_workload,
    metrics_workload,
    stored,
    stored_states,
    trial_json,
)
from dstrial.master.lifecycle import allocations as allocation_life
from dstrial.master.lifecycle import trials
from dstrial.master.services import Services
from dstrial.master.store import allocations as allocation_rows
from dstrial.master.store import checkpoints as checkpoint_rows
from dstrial.master.store import experiments as experiment_rows
from dstrial.master.store import trials as trial_rows
from dstrial.master.store.database import Connection, Transaction
from dstrial.master.store.reports import metrics
from dstrial.master.store.reports.metric_summaries import MAX_NAME_CHARS
from dstrial.master.store.views import listings

_MAX_METADATA_BYTES = 1 << 20  # of a run's metadata as JSON
_MAX_STEPS = 2**31 - 1  # of completed batches, and of a run's number
_MAX_WAIT_S = 600  # longest long poll for a preemption, which is what clients request
MAX_LOG_DAYS = 32767  # longest log retention, a smallint in Determined's database
_INFERENCE = bindings.v1TrialSourceInfoType.INFERENCE.value
# Kinds of workloads; the numbers order the workloads of one batch.
_TRAINING, _VALIDATION, _CHECKPOINT = 0, 1, 2
_KINDS = {
    "FILTER_OPTION_CHECKPOINT": {_CHECKPOINT},
    "FILTER_OPTION_VALIDATION": {_VALIDATION},
    "FILTER_OPTION_CHECKPOINT_OR_VALIDATION": {_VALIDATION, _CHECKPOINT},
}


@reads
def list_trials(connection: Connection, request: ApiRequest) -> dict[str, Any]:
    experiment_id = request.path_params["experiment_id"]
    experiment_rows.require(connection, experiment_id)
    states = stored_states(request.query_choices("states", bindings.experimentv1State))
    page = request.page_of(listings.count_trials(connection, experiment_id, states))
    rows = listings.list_trials(
        connection,
        now_us=now_us(),
        experiment_id=experiment_id,
        states=states,
        sort_by=request.query_choice("sortBy", bindings.v1GetExperimentTrialsRequestSortBy),
        is_descending=request.is_descending,
        offset=page.start,
        limit=page.end - page.start,
    )
    return {"pagination": page.to_json(), "trials": [trial_json(request.services, row) for row in rows]}


def read_trial_json(connection: Connection, request: ApiRequest, trial_id: int) -> dict[str, Any]:
    trial_rows.require(connection, trial_id)
    (row,) = listings.list_trials(connection, now_us=now_us(), trial_id=trial_id)
    return trial_json(request.services, row)


@reads
def show_trial(connection: Connection, request: ApiRequest) -> dict[str, Any]:
    trial = read_trial_json(connection, request, request.path_params["trial_id"])
    return message(bindings.v1GetTrialResponse, trial=trial)


def require_trial_of_task(connection: Connection, task_id: str) -> trial_rows.Trial:
    trial = trial_rows.of_task(connection, task_id)
    if trial is None:
        raise RequestError(404, f"task {task_id[:80]!r} is not found; expected a trial's task. Name another.")
    return trial


@reads
def list_workloads(connection: Connection, request: ApiRequest) -> dict[str, Any]:
    trial_id, wanted_group = request.path_params["trial_id"], request.query("group")
    which = request.query_choice("filter", bindings.GetTrialWorkloadsRequestFilterOption) or ""
    hides_deleted = request.query_flag("removeDeletedCheckpoints")
    has_batches = bool(request.query_flag("includeBatchMetrics"))
    kinds = _KINDS.get(which, {_TRAINING, _VALIDATION, _CHECKPOINT})
    trial_rows.require(connection, trial_id)
    # Fetch only sort keys: a trial may have millions of reports, and a page shows a hundred.
    found: list[tuple[int, int, int | checkpoint_rows.Checkpoint]] = [
        (steps, _VALIDATION if group == "validation" else _TRAINING, report_id)
        for report_id, steps, group in metrics.report_keys(connection, trial_id)
        if wanted_group in (None, "", group)
    ]
    found += [
        (saved.steps, _CHECKPOINT, saved)
        for saved in checkpoint_rows.by_batch(connection, trial_id)
        if not (hides_deleted and saved.state == "DELETED")
    ]
    rows, pagination = request.page(
        sorted(
            (item for item in found if item[1] in kinds),
            key=lambda item: item[:2],
            reverse=request.is_descending,
        )
    )
    workloads = [
        _report_workload(connection, one, has_batches=has_batches)
        if isinstance(one, int)
        else _checkpoint_workload(one, request.services.secret_names)
        for _, _, one in rows
    ]
    return message(
        bindings.v1GetTrialWorkloadsResponse,
        pagination=pagination,
        workloads=[message(bindings.v1WorkloadContainer, **workload) for workload in workloads],
    )


def _report_workload(connection: Connection, report_id: int, *, has_batches: bool) -> dict[str, Any]:
    row = metrics.get_report(connection, report_id)
    assert row is not None  # the id was read in the same snapshot
    kind = "validation" if row.group_name == "validation" else "training"
    return {
        kind: metrics_workload(row.metrics, row.steps, row.end_us, row.per_batch if has_batches else None)
    }


def _checkpoint_workload(saved: checkpoint_rows.Checkpoint, names: SecretNames) -> dict[str, Any]:
    return {
        "checkpoint": checkpoint_workload(
            uuid=saved.uuid,
            state=saved.state,
            steps=saved.steps,
            report_us=saved.report_us,
            resources=saved.resources,
            metadata=saved.metadata,
            names=names,
        )
    }


@writes
def kill_trial(tx: Transaction, request: ApiRequest) -> None:
    trials.kill_trial(tx, request.path_params["trial_id"])


@writes
def report_progress(tx: Transaction, request: ApiRequest) -> None:
    trials.report_progress(tx, request.path_params["trial_id"], request.body().number("progress") or 0.0)


@writes
def report_early_exit(tx: Transaction, request: ApiRequest) -> None:
    reason = (request.body().text("reason") or "").removeprefix("EXITED_REASON_")
    trials.early_exit(tx, request.path_params["trial_id"], reason)


@writes
def set_runner_metadata(tx: Transaction, request: ApiRequest) -> None:
    state = (request.body().text("state") or "UNSPECIFIED")[:100]
    trials.set_runner_state(tx, request.path_params["trial_id"], state)


@writes
def retain_logs(tx: Transaction, request: ApiRequest) -> None:
    trial = trial_rows.require(tx.connection, request.path_params["trial_id"])
    trial_rows.keep_logs(tx, trial.id, request.body().required_integer("numDays", -1, MAX_LOG_DAYS))


@writes
def start_run(tx: Transaction, request: ApiRequest) -> dict[str, Any]:
    """Mark the allocation that sends the request as ready."""
    run_id = request.body().required_integer("runId")
    request.require_trial(run_id)
    trial_rows.require(tx.connection, run_id)
    if request.allocation is not None:
        allocation_life.mark_ready(tx, request.allocation.id)
    return message(bindings.v1RunPrepareForReportingResponse, storageId=None)


@reads
def show_run_metadata(connection: Connection, request: ApiRequest) -> dict[str, Any]:
    row = trial_rows.require(connection, request.path_params["run_id"])
    return {"metadata": json.loads(row.metadata) if row.metadata else {}}


@writes
def set_run_metadata(tx: Transaction, request: ApiRequest) -> dict[str, Any]:
    metadata = request.body().mapping("metadata") or {}
    if len(json.dumps(metadata)) > _MAX_METADATA_BYTES:
        raise RequestError(413, "metadata is too large; expected at most 1 MiB. Keep it in a checkpoint.")
    trials.set_metadata(tx, request.path_params["run_id"], metadata)
    return {"metadata": as_data(metadata)}


@writes
def report_source(tx: Transaction, request: ApiRequest) -> dict[str, Any]:
    """Record that a trial starts from or evaluates a checkpoint or model version."""
    body = request.body()
    source = body.fields("trialSourceInfo") or body
    trial_id, uuid = source.required_integer("trialId"), source.required_text("checkpointUuid")
    kind = source.choice("trialSourceInfoType", bindings.v1TrialSourceInfoType) or _INFERENCE
    model_id, version = source.integer("modelId"), source.integer("modelVersion")
    request.require_trial(trial_id)
    trial_rows.require(tx.connection, trial_id)
    checkpoint_rows.note_user(tx, uuid, trial_id, kind)
    if model_id is not None and version is not None:
        checkpoint_rows.note_version_user(tx, model_id, version, trial_id, kind)
    return {"trialId": trial_id, "checkpointUuid": uuid}


async def preemption_signal(request: ApiRequest) -> dict[str, Any]:
    """Wait (long poll) until the allocation is asked to stop or has ended.

    The response's ``preempt`` is true in these cases, and false if the request's timeout ends first.
    """
    allocation_id = request.path_params["allocation_id"]
    timeout_s = request.query_int("timeoutSeconds") or 0
    services = request.services
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + min(max(timeout_s, 0), _MAX_WAIT_S)
    with services.pubsub.follow(f"allocation:{allocation_id}".__eq__) as follower:
        while True:
            row = await services.read(allocation_rows.require, allocation_id)
            if not row.is_ready:
                await services.write(lambda tx: allocation_life.mark_ready(tx, allocation_id))
                continue
            is_asked = row.preempt_us is not None or row.state == "TERMINATED"
            left_s = deadline_s - loop.time()
            if is_asked or left_s <= 0:
                return {"preempt": is_asked}
            await follower.next(left_s)


@writes
def acknowledge_preemption(tx: Transaction, request: ApiRequest) -> None:
    allocation_life.acknowledge_preemption(tx, request.path_params["allocation_id"])


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
    end_us = report_time_us(report.text("reportTime"))
    if len(group) > MAX_NAME_CHARS:
        raise RequestError(400, "group is too long; expected a name. Choose another.")
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


def report_time_us(text: str | None) -> int:
    """Return a report's time in microseconds since the epoch; now if ``text`` is None."""
    if text is None:
        return now_us()
    try:
        return parse_time(text)
    except (ValueError, OverflowError) as error:
        raise RequestError(
            400, f"reportTime is {text[:80]!r}; expected a time. Send 2026-01-31T12:00:00Z."
        ) from error


def _streaming(group: str | None) -> Callable[[ApiRequest], Any]:
    async def handle(request: ApiRequest) -> Stream:
        chosen = request.query("group") or "" if group is None else group
        trial_ids = request.query_ints("trialIds")
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
    """Return a report of metrics as ``v1MetricsReport``.

    ``group`` is the metric group in the request. If ``group`` is None, a validation report has its values under both
    ``validation_metrics`` and ``avg_metrics``.
    """
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


_ONE = "/trials/{trial_id:int}"
_ALLOCATION = "/allocations/{allocation_id}"
routes = [
    route("GET", "/experiments/{experiment_id:int}/trials", list_trials, access=TRIAL),
    route("GET", _ONE, show_trial, access=TRIAL),
    route("GET", f"{_ONE}/workloads", list_workloads, access=TRIAL),
    route("POST", f"{_ONE}/kill", kill_trial, access=USER),
    route("POST", f"{_ONE}/progress", report_progress, access=TRIAL),
    route("POST", f"{_ONE}/early_exit", report_early_exit, access=TRIAL),
    route("POST", f"{_ONE}/runner/metadata", set_runner_metadata, access=TRIAL),
    route("PUT", f"{_ONE}/retain_logs", retain_logs, access=USER),
    route("POST", f"{_ONE}/metrics", report_metrics, access=TRIAL),
    route("GET", "/trials/metrics/trial_metrics", _streaming(None), access=TRIAL),
    route("GET", "/trials/metrics/training_metrics", _streaming("training"), access=TRIAL),
    route("GET", "/trials/metrics/validation_metrics", _streaming("validation"), access=TRIAL),
    route("POST", "/runs/start", start_run, access=TRIAL),
    route("GET", "/runs/{run_id:int}/metadata", show_run_metadata, access=TRIAL),
    route("POST", "/runs/{run_id:int}/metadata", set_run_metadata, access=TRIAL),
    route("POST", "/trial-source-info", report_source, access=TRIAL),
    route("GET", f"{_ALLOCATION}/signals/preemption", preemption_signal, access=TRIAL),
    route("POST", f"{_ALLOCATION}/signals/ack_preemption", acknowledge_preemption, access=TRIAL),
]
