"""Routes for checkpoints: report, list, show, download, delete."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import tarfile
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from determined.common.api import bindings
from starlette.responses import StreamingResponse

from dstrial import object_storage
from dstrial.checkpoint.completion_marker import is_uuid
from dstrial.config.secrets import unmasked
from dstrial.errors import CheckpointError, RequestError
from dstrial.master.api.trials import report_json, report_time_us, require_trial_of_task
from dstrial.master.backends.environment import user_variables
from dstrial.master.clock import format_us
from dstrial.master.http.responses import message
from dstrial.master.http.router import TRIAL, USER, ApiRequest, reads, route, writes
from dstrial.master.http.serializers import checkpoint_json
from dstrial.master.lifecycle import checkpoint_gc, trials
from dstrial.master.store import background_jobs, experiments
from dstrial.master.store import checkpoints as checkpoint_rows
from dstrial.master.store import trials as trial_rows
from dstrial.master.store.database import Connection, Transaction
from dstrial.master.store.reports import metrics
from dstrial.master.store.reports.metric_summaries import as_number
from dstrial.master.trial_files import open_regular
from dstrial.object_storage import external_storage, is_object_storage
from dstrial.scratch import scratch_directory

_CHUNK_BYTES = 1 << 16  # capacity of a pipe


def _file_sizes(given: dict[str, Any] | None) -> dict[str, int]:
    sizes = {}
    for path, size in (given or {}).items():
        try:
            sizes[str(path)] = max(int(size), 0)
        except (TypeError, ValueError) as error:
            raise RequestError(
                400, f"the size of {path!r} is {size!r}; expected bytes, a whole number."
            ) from error
    return sizes


async def report_checkpoint(request: ApiRequest) -> dict[str, Any]:
    body = request.body()
    uuid, task_id = body.required_text("uuid"), body.required_text("taskId")
    if not is_uuid(uuid) or uuid == request.services.cluster_id:
        raise body.wrong(
            "uuid", "a new UUID in lower case with hyphens, as Python's str(uuid.uuid4()) has it"
        )
    request.require_task(task_id)
    allocation_id = body.text("allocationId") or None
    if allocation_id is not None:
        request.require_allocation(allocation_id)
    resources = _file_sizes(body.mapping("resources"))
    metadata = body.mapping("metadata") or {}
    steps = metadata.get("steps_completed", 0)
    if isinstance(steps, bool) or not isinstance(steps, int) or not 0 <= steps < 2**31:
        raise RequestError(400, f"metadata.steps_completed is {steps!r}; expected batches, a whole number.")
    state = (body.text("state") or "STATE_COMPLETED").removeprefix("STATE_")
    if state not in ("ACTIVE", "COMPLETED", "ERROR", "DELETED", "PARTIALLY_DELETED"):
        raise body.wrong("state", "a state of a checkpoint")
    report_us = report_time_us(body.text("reportTime"))
    if allocation_id is not None and state == "COMPLETED":
        await _require_storage(request, task_id)

    def perform(tx: Transaction) -> None:
        trials.report_checkpoint(
            tx,
            require_trial_of_task(tx.connection, task_id),
            uuid=uuid,
            allocation_id=allocation_id,
            state=state,
            resources=resources,
            metadata=metadata,
            report_us=report_us,
        )

    await request.services.write(perform)
    return {}


async def _require_storage(request: ApiRequest, task_id: str) -> None:
    """Raise HTTP 409 if the checkpoint storage of the task's trial is unavailable."""

    def read(connection: Connection) -> dict[str, Any] | None:
        trial = trial_rows.of_task(connection, task_id)
        if trial is None:
            return None
        config = json.loads(experiments.require(connection, trial.experiment_id).config)
        storage: dict[str, Any] = config["checkpoint_storage"]
        return storage

    services = request.services
    storage = await services.read(read)
    if storage is not None:
        trouble = await services.run(lambda: services.storages.trouble(storage))
        if trouble is not None:
            # On 503, clients would retry indefinitely while the trial holds its slots.
            raise RequestError(409, trouble)


def _read_checkpoint_json(connection: Connection, request: ApiRequest) -> dict[str, Any]:
    row = checkpoint_rows.require_checkpoint(connection, request.path_params["checkpoint_uuid"])
    return checkpoint_json(row, request.services.secret_names)


@reads
def show_checkpoint(connection: Connection, request: ApiRequest) -> dict[str, Any]:
    return message(bindings.v1GetCheckpointResponse, checkpoint=_read_checkpoint_json(connection, request))


async def patch_checkpoints(request: ApiRequest) -> dict[str, Any]:
    """Store which files each checkpoint in the request has, as path -> size in bytes."""
    changes: list[tuple[str, dict[str, int]]] = []
    for item in request.body().items_of("checkpoints") or []:
        if not isinstance(item, dict) or not isinstance(item.get("uuid"), str):
            raise RequestError(400, "checkpoints has an item without uuid; expected uuid and resources.")
        await request.require_checkpoint(item["uuid"], is_change=True)
        wrapped = item.get("resources")
        if isinstance(wrapped, dict):
            inner = wrapped.get("resources")
            changes.append((item["uuid"], _file_sizes(inner if isinstance(inner, dict) else {})))

    def perform(tx: Transaction) -> None:
        for uuid, resources in changes:
            checkpoint_rows.set_resources(tx, uuid, resources)

    await request.services.write(perform)
    return {}


@writes
def delete_checkpoints(tx: Transaction, request: ApiRequest) -> None:
    _request_deletion(tx, request, ["**/*"])


@writes
def remove_files(tx: Transaction, request: ApiRequest) -> None:
    """Enqueue a background job that deletes files of checkpoints.

    The job deletes files whose paths match a pattern of ``checkpointGlobs``. Without patterns, the job only updates the stored
    file lists from the storage.
    """
    globs = request.body().texts("checkpointGlobs") or []
    if any(pattern.startswith("/") or ".." in pattern.split("/") for pattern in globs):
        raise RequestError(400, "checkpointGlobs leads out of the checkpoint; expected patterns below it.")
    _request_deletion(tx, request, globs)


def _request_deletion(tx: Transaction, request: ApiRequest, globs: list[str]) -> None:
    in_use = checkpoint_rows.in_use(tx.connection)
    by_experiment: dict[int, list[str]] = {}
    for uuid in request.body().texts("checkpointUuids") or []:
        row = checkpoint_rows.require_checkpoint(tx.connection, uuid)
        if uuid in in_use and globs:
            raise RequestError(
                400,
                f"checkpoint {uuid} is {in_use[uuid]}; expected one that is not in use. Keep it, or delete the version "
                "of the model first.",
            )
        by_experiment.setdefault(row.experiment_id, []).append(uuid)
    for experiment_id, chosen in by_experiment.items():
        background_jobs.request(tx, "delete_checkpoints", experiment_id, {"uuids": chosen, "globs": globs})


@writes
def set_metadata(tx: Transaction, request: ApiRequest) -> dict[str, Any]:
    uuid = request.path_params["checkpoint_uuid"]
    given = request.body().fields("checkpoint")
    if given is None:
        raise request.body().wrong("checkpoint", "an object")
    # The client modifies the metadata it received and sends back the whole mapping.
    before = json.loads(checkpoint_rows.require_checkpoint(tx.connection, uuid).metadata)
    metadata = unmasked(given.mapping("metadata") or {}, [before], "the checkpoint's metadata")
    checkpoint_rows.set_metadata(tx, uuid, metadata)
    return message(
        bindings.v1PostCheckpointMetadataResponse, checkpoint=_read_checkpoint_json(tx.connection, request)
    )


@reads
def list_metrics(connection: Connection, request: ApiRequest) -> dict[str, Any]:
    """Return the metric reports of trials that use a checkpoint.

    A trial uses a checkpoint if it starts from or evaluates the checkpoint; the trial reports this use with ``report_source``.
    """
    uuid, group = request.path_params["checkpoint_uuid"], request.query("metricGroup") or None
    kind = request.query_choice("trialSourceInfoType", bindings.v1TrialSourceInfoType)
    checkpoint_rows.require_checkpoint(connection, uuid)
    rows = metrics.reports(connection, checkpoint_rows.users_of(connection, uuid, kind), group)
    return message(
        bindings.v1GetTrialMetricsByCheckpointResponse, metrics=[report_json(row, group) for row in rows]
    )


async def download(request: ApiRequest) -> StreamingResponse:
    """Stream a checkpoint's files as tar.gz; the ``Accept`` header is ignored."""
    uuid = request.path_params["checkpoint_uuid"]
    row = await request.services.read(checkpoint_rows.require_checkpoint, uuid)
    config = json.loads(row.experiment_config)
    storage, stack = external_storage(config), contextlib.ExitStack()
    no_files = RequestError(
        404, f"checkpoint {uuid} has no files any more; expected one that is not deleted."
    )
    if row.state == "DELETED":
        raise no_files
    if storage is not None and is_object_storage(storage):
        directory = stack.enter_context(scratch_directory("dstrial-download-"))
        try:
            await asyncio.to_thread(
                object_storage.download, storage, uuid, directory, variables=user_variables(config)
            )
        except CheckpointError as error:
            stack.close()
            raise RequestError(502, str(error)) from error
    else:
        directory = checkpoint_gc.checkpoint_directory(config["checkpoint_storage"], uuid)
        if not directory.is_dir():
            raise no_files
    return StreamingResponse(
        _archive(directory, stack),
        media_type="application/gzip",
        headers={"Content-Disposition": f'attachment; filename="{uuid}.tar.gz"'},
    )


async def _archive(directory: Path, stack: contextlib.ExitStack) -> AsyncIterator[bytes]:
    """Yield a tar.gz of a directory's regular files; raise if a file is unreadable."""
    read_end, write_end = os.pipe()
    problems: list[Exception] = []

    def write() -> None:
        try:
            with os.fdopen(write_end, "wb") as file, tarfile.open(fileobj=file, mode="w|gz") as tar:
                paths = [path for path in directory.rglob("*") if path.is_file() and not path.is_symlink()]
                for path in sorted(paths):
                    with open_regular(path, is_own=False) as source:
                        name = path.relative_to(directory).as_posix()
                        tar.addfile(tar.gettarinfo(arcname=name, fileobj=source), source)
        except Exception as error:  # noqa: BLE001 - raised below, or the reader has gone
            problems.append(error)

    thread = threading.Thread(target=write, name="dstrial-archive", daemon=True)
    thread.start()
    # The event loop waits on the pipe, so a hanging storage does not block a thread of the shared pool.
    reader = asyncio.StreamReader(_CHUNK_BYTES)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_end, "rb", buffering=0)
    )
    with stack, contextlib.closing(transport):
        while chunk := await reader.read(_CHUNK_BYTES):
            yield chunk
    thread.join()  # returns at once: the thread has closed its end of the pipe
    if problems:
        raise problems[0]


@reads
def preview_gc(connection: Connection, request: ApiRequest) -> dict[str, Any]:
    """Return an experiment's checkpoints that a retention policy would delete.

    The query has the policy: the numbers of checkpoints to keep of the experiment's best, of each trial's best, and of each
    trial's latest.
    """
    experiment = experiments.require(connection, request.path_params["experiment_id"])
    policy = checkpoint_gc.Policy(
        *(request.query_int(name) or 0 for name in ("saveExperimentBest", "saveTrialBest", "saveTrialLatest"))
    )
    rows = {row.uuid: row for row in checkpoint_gc.unused(connection, experiment.id)}
    chosen = checkpoint_gc.plan(
        [checkpoint_gc.Candidate.of_row(row) for row in rows.values()],
        policy,
        smaller_is_better=bool(experiment.smaller_is_better),
    )
    return {
        "metric_name": experiment.searcher_metric,
        "checkpoints": [_previewed_json(rows[uuid]) for uuid in chosen],
    }


def _previewed_json(row: checkpoint_rows.CheckpointInfo) -> dict[str, Any]:
    validation = json.loads(row.validation) if row.validation else {}
    return {
        "TrialID": row.trial_id,
        "StepsCompleted": row.steps,
        "State": row.state,
        "UUID": row.uuid,
        "Resources": json.loads(row.resources),
        "ValidationMetrics": validation,
        "ReportTime": format_us(row.report_us),
        "step": {"trial_id": row.trial_id, "total_batches": row.steps, "validation": validation or None},
    }


_COLUMNS = {
    "SORT_BY_UUID": "uuid",
    "SORT_BY_TRIAL_ID": "trial_id",
    "SORT_BY_BATCH_NUMBER": "steps",
    "SORT_BY_STATE": "state",
}


@reads
def list_checkpoints(connection: Connection, request: ApiRequest) -> dict[str, Any]:
    """Return a page of checkpoints, sorted by an attribute or a validation metric.

    If sorted by a metric, the best checkpoint comes first by default. Checkpoints without the attribute or metric always come
    last.
    """
    sort_by = request.query_choice("sortByAttr", bindings.checkpointv1SortBy)
    metric = request.query("sortByMetric")
    states = tuple(
        name.removeprefix("STATE_") for name in request.query_choices("states", bindings.checkpointv1State)
    )
    rows = checkpoint_rows.list_checkpoints(
        connection,
        trial_id=request.path_params.get("trial_id"),
        experiment_id=request.path_params.get("experiment_id"),
        states=states,
    )
    is_descending = request.is_descending
    is_best_first = sort_by == "SORT_BY_SEARCHER_METRIC" or metric is not None
    if is_best_first and request.query("orderBy") in (None, "ORDER_BY_UNSPECIFIED") and rows:
        is_descending = not rows[0].smaller_is_better

    def key(row: checkpoint_rows.CheckpointInfo) -> Any:
        if is_best_first:
            values = json.loads(row.validation) if row.validation else {}
            value = as_number(values.get(metric or row.searcher_metric))
            return None if value is None or value != value else value
        return getattr(row, _COLUMNS.get(sort_by or "", "report_us"))

    known = sorted((row for row in rows if key(row) is not None), key=key, reverse=is_descending)
    shown, pagination = request.page(known + [row for row in rows if key(row) is None])
    names = request.services.secret_names
    return {"checkpoints": [checkpoint_json(row, names) for row in shown], "pagination": pagination}


_ONE = "/checkpoints/{checkpoint_uuid}"
_OF_EXPERIMENT = "/experiments/{experiment_id:int}"
routes = [
    route("POST", "/checkpoints", report_checkpoint, access=TRIAL),
    route("PATCH", "/checkpoints", patch_checkpoints, access=TRIAL),
    route("DELETE", "/checkpoints", delete_checkpoints, access=USER),
    route("POST", "/checkpoints/rm", remove_files, access=USER),
    route("GET", _ONE, show_checkpoint, access=TRIAL),
    route("POST", f"{_ONE}/metadata", set_metadata, access=USER),
    route("GET", f"{_ONE}/metrics", list_metrics, access=USER),
    route("GET", f"/{_ONE}", download, access=TRIAL),
    route("GET", f"{_OF_EXPERIMENT}/checkpoints", list_checkpoints, access=TRIAL),
    route("GET", f"/{_OF_EXPERIMENT}/preview_gc", preview_gc, access=USER),
    route("GET", "/trials/{trial_id:int}/checkpoints", list_checkpoints, access=TRIAL),
]
