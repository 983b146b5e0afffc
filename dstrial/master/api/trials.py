"""Trials: list, show, workloads, progress reports, preemption, kill."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from determined.common.api import bindings

from dstrial.config.secrets import SecretNames
from dstrial.errors import RequestError
from dstrial.master.clock import now_us
from dstrial.master.http.messages import Page, message, page_of
from dstrial.master.http.router import TRIAL, USER, ApiRequest, route
from dstrial.master.http.serializers import (
    as_data,
    checkpoint_workload,
    metrics_workload,
    stored_states,
    trial_json,
)
from dstrial.master.lifecycle import allocations as allocation_life
from dstrial.master.lifecycle import trials
from dstrial.master.store import allocations as allocation_rows
from dstrial.master.store import checkpoints as checkpoint_rows
from dstrial.master.store import experiments as experiment_rows
from dstrial.master.store import trials as trial_rows
from dstrial.master.store.database import Connection, Transaction
from dstrial.master.store.reports import metrics
from dstrial.master.store.views import listings


async def list_trials(request: ApiRequest) -> dict[str, Any]:
    experiment_id = request.path_params["experiment_id"]
    states = stored_states(request.query_choices("states", bindings.experimentv1State))
    sort_by = request.query_choice("sortBy", bindings.v1GetExperimentTrialsRequestSortBy)
    is_descending = request.query_choice("orderBy", bindings.v1OrderBy) == "ORDER_BY_DESC"
    offset, limit = request.query_int("offset"), request.query_int("limit")

    def read(connection: Connection) -> tuple[Any, list[listings.ListedTrial]]:
        experiment_rows.require(connection, experiment_id)
        page = page_of(listings.count_trials(connection, experiment_id, states), offset, limit)
        rows = listings.list_trials(
            connection,
            now_us=now_us(),
            experiment_id=experiment_id,
            states=states,
            sort_by=sort_by,
            is_descending=is_descending,
            offset=page.start,
            limit=page.end - page.start,
        )
        return page, rows

    page, rows = await request.services.read(read)
    return {"pagination": page.to_json(), "trials": [trial_json(request.services, row) for row in rows]}


async def show_trial(request: ApiRequest) -> dict[str, Any]:
    trial_id = request.path_params["trial_id"]

    def read(connection: Connection) -> list[listings.ListedTrial]:
        trial_rows.require(connection, trial_id)
        return listings.list_trials(connection, now_us=now_us(), trial_id=trial_id)

    rows = await request.services.read(read)
    return message(bindings.v1GetTrialResponse, trial=trial_json(request.services, rows[0]))


async def list_workloads(request: ApiRequest) -> dict[str, Any]:
    trial_id = request.path_params["trial_id"]
    which = request.query_choice("filter", bindings.GetTrialWorkloadsRequestFilterOption) or ""
    wanted_group = request.query("group")
    hides_deleted = request.query_flag("removeDeletedCheckpoints")
    is_descending = request.query_choice("orderBy", bindings.v1OrderBy) == "ORDER_BY_DESC"
    has_batches = request.query_flag("includeBatchMetrics")
    offset, limit = request.query_int("offset"), request.query_int("limit")

    kinds = {
        "FILTER_OPTION_CHECKPOINT": {2},
        "FILTER_OPTION_VALIDATION": {1},
        "FILTER_OPTION_CHECKPOINT_OR_VALIDATION": {1, 2},
    }.get(which, {0, 1, 2})

    def read(connection: Connection) -> tuple[Page, list[dict[str, Any]]]:
        trial_rows.require(connection, trial_id)
        # Fetch only sort keys: a trial may have millions of reports, and a page shows a hundred.
        found: list[tuple[int, int, int | checkpoint_rows.Checkpoint]] = [
            (steps, 1 if group == "validation" else 0, report_id)
            for report_id, steps, group in metrics.report_keys(connection, trial_id)
            if wanted_group in (None, "", group)
        ]
        found += [
            (saved.steps, 2, saved)
            for saved in checkpoint_rows.by_batch(connection, trial_id)
            if not (hides_deleted and saved.state == "DELETED")
        ]
        found = sorted(
            (item for item in found if item[1] in kinds), key=lambda item: item[:2], reverse=is_descending
        )
        page = page_of(len(found), offset, limit)
        return page, [
            _report_workload(connection, one, has_batches=bool(has_batches))
            if isinstance(one, int)
            else _checkpoint_workload(one, request.services.secret_names)
            for _, _, one in found[page.start : page.end]
        ]

    page, workloads = await request.services.read(read)
    return message(
        bindings.v1GetTrialWorkloadsResponse,
        pagination=page.to_json(),
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


async def kill_trial(request: ApiRequest) -> dict[str, Any]:
    trial_id = request.path_params["trial_id"]
    await request.services.write(lambda tx: trials.kill_trial(tx, trial_id))
    return {}


async def report_progress(request: ApiRequest) -> dict[str, Any]:
    trial_id, progress = request.path_params["trial_id"], request.body().number("progress") or 0.0
    await request.services.write(lambda tx: trials.report_progress(tx, trial_id, progress))
    return {}


async def report_early_exit(request: ApiRequest) -> dict[str, Any]:
    trial_id, reason = request.path_params["trial_id"], request.body().text("reason") or ""
    await request.services.write(
        lambda tx: trials.early_exit(tx, trial_id, reason.removeprefix("EXITED_REASON_"))
    )
    return {}


async def set_runner_metadata(request: ApiRequest) -> dict[str, Any]:
    trial_id, state = request.path_params["trial_id"], (request.body().text("state") or "UNSPECIFIED")[:100]
    await request.services.write(lambda tx: trials.set_runner_state(tx, trial_id, state))
    return {}


async def retain_logs(request: ApiRequest) -> dict[str, Any]:
    days = request.body().required_integer("numDays", -1, 32767)
    trial_id = request.path_params["trial_id"]

    def perform(tx: Transaction) -> None:
        trial_rows.require(tx.connection, trial_id)
        trial_rows.keep_logs(tx, trial_id, days)

    await request.services.write(perform)
    return {}


async def start_run(request: ApiRequest) -> dict[str, Any]:
    """Mark the trial's code as ready; return the id of its checkpoint storage."""
    body = request.body()
    run_id = body.required_integer("runId")
    request.require_trial(run_id)
    storage = body.mapping("checkpointStorage")
    allocation = request.allocation

    def perform(tx: Transaction) -> int | None:
        trial_rows.require(tx.connection, run_id)
        if allocation is not None:
            allocation_life.mark_ready(tx, allocation.id)
        return None if storage is None else checkpoint_rows.storage_id(tx, storage)

    number = await request.services.write(perform)
    return message(bindings.v1RunPrepareForReportingResponse, storageId=number)


async def show_run_metadata(request: ApiRequest) -> dict[str, Any]:
    row = await request.services.read(trial_rows.require, request.path_params["run_id"])
    return {"metadata": json.loads(row.metadata) if row.metadata else {}}


async def set_run_metadata(request: ApiRequest) -> dict[str, Any]:
    run_id, metadata = request.path_params["run_id"], request.body().mapping("metadata") or {}
    if len(json.dumps(metadata)) > _MAX_METADATA_BYTES:
        raise RequestError(413, "metadata is too large; expected at most 1 MiB. Keep it in a checkpoint.")
    await request.services.write(lambda tx: trials.set_metadata(tx, run_id, metadata))
    return {"metadata": as_data(metadata)}


async def report_source(request: ApiRequest) -> dict[str, Any]:
    """Record that a trial uses a checkpoint or a model version."""
    body = request.body()
    source = body.fields("trialSourceInfo") or body
    trial_id, uuid = source.required_integer("trialId"), source.required_text("checkpointUuid")
    kind = source.choice("trialSourceInfoType", bindings.v1TrialSourceInfoType) or _INFERENCE
    model_id, version = source.integer("modelId"), source.integer("modelVersion")
    request.require_trial(trial_id)

    def perform(tx: Transaction) -> None:
        trial_rows.require(tx.connection, trial_id)
        checkpoint_rows.note_user(tx, uuid, trial_id, kind)
        if model_id is not None and version is not None:
            checkpoint_rows.note_version_user(tx, model_id, version, trial_id, kind)

    await request.services.write(perform)
    return {"trialId": trial_id, "checkpointUuid": uuid}


async def preemption_signal(request: ApiRequest) -> dict[str, Any]:
    """Long-poll until the allocation should stop, or until the timeout."""
    allocation_id = request.path_params["allocation_id"]
    timeout_s = request.query_int("timeout_seconds")
    if timeout_s is None:
        timeout_s = request.query_int("timeoutSeconds") or 0
    services = request.services
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + min(max(timeout_s, 0), _MAX_WAIT_S)
    topic = f"allocation:{allocation_id}"
    while True:
        seen = services.pubsub.version(topic)
        row = await services.read(allocation_rows.require, allocation_id)
        if not row.is_ready:
            await services.write(lambda tx: allocation_life.mark_ready(tx, allocation_id))
            continue
        is_asked = row.preempt_us is not None or row.state == "TERMINATED"
        left_s = deadline_s - loop.time()
        if is_asked or left_s <= 0:
            return {"preempt": is_asked}
        await services.pubsub.wait(topic, seen, left_s)


async def acknowledge_preemption(request: ApiRequest) -> dict[str, Any]:
    allocation_id = request.path_params["allocation_id"]
    await request.services.write(lambda tx: allocation_life.acknowledge_preemption(tx, allocation_id))
    return {}


_MAX_METADATA_BYTES = 1 << 20
_MAX_WAIT_S = 600
_INFERENCE = bindings.v1TrialSourceInfoType.INFERENCE.value
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
    route("POST", "/runs/start", start_run, access=TRIAL),
    route("GET", "/runs/{run_id:int}/metadata", show_run_metadata, access=TRIAL),
    route("POST", "/runs/{run_id:int}/metadata", set_run_metadata, access=TRIAL),
    route("POST", "/trial-source-info", report_source, access=TRIAL),
    route("GET", f"{_ALLOCATION}/signals/preemption", preemption_signal, access=TRIAL),
    route("POST", f"{_ALLOCATION}/signals/ack_preemption", acknowledge_preemption, access=TRIAL),
]
