"""Checkpoints: report, list, show, download, delete."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import tarfile
import threading
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import IO, Any

from determined.common.api import bindings
from starlette.responses import StreamingResponse

from dstrial.checkpoint.completion_marker import is_uuid
from dstrial.config.secrets import unmasked
from dstrial.errors import RequestError
from dstrial.master.api.metrics import report_json
from dstrial.master.clock import format_us, now_us, parse_time
from dstrial.master.http.messages import message, page_of
from dstrial.master.http.router import TRIAL, USER, ApiRequest, route
from dstrial.master.http.serializers import checkpoint_json, sizes_as_texts
from dstrial.master.lifecycle import checkpoint_gc, trials
from dstrial.master.store import background_jobs, experiments
from dstrial.master.store import checkpoints as checkpoint_rows
from dstrial.master.store import trials as trial_rows
from dstrial.master.store.database import Connection, Transaction
from dstrial.master.store.reports import metrics
from dstrial.master.store.reports.metric_summaries import as_number
from dstrial.master.trial_files import open_regular

_CHUNK_BYTES = 1 << 16  # what a pipe holds


def _sizes(given: dict[str, Any] | None) -> dict[str, int]:
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
    resources = _sizes(body.mapping("resources"))
    metadata = body.mapping("metadata") or {}
    steps = metadata.get("steps_completed", 0)
    if isinstance(steps, bool) or not isinstance(steps, int) or not 0 <= steps < 2**31:
        raise RequestError(400, f"metadata.steps_completed is {steps!r}; expected batches, a whole number.")
    state = (body.text("state") or "STATE_COMPLETED").removeprefix("STATE_")
    if state not in ("ACTIVE", "COMPLETED", "ERROR", "DELETED", "PARTIALLY_DELETED"):
        raise body.wrong("state", "a state of a checkpoint")
    time_text = body.text("reportTime")
    try:
        report_us = now_us() if time_text is None else parse_time(time_text)
    except (ValueError, OverflowError) as error:
        raise body.wrong("reportTime", "a time") from error

    if allocation_id is not None and state == "COMPLETED":
        await _require_storage(request, task_id)

    def perform(tx: Transaction) -> None:
        trial = trial_rows.of_task(tx.connection, task_id)
        if trial is None:
            raise RequestError(404, f"task {task_id[:80]!r} is not found; expected a trial's task.")
        trials.report_checkpoint(
            tx,
            uuid=uuid,
            trial=trial,
            allocation_id=allocation_id,
            storage_id=body.integer("storageId"),
            state=state,
            resources=resources,
            metadata=metadata,
            report_us=report_us,
        )

    await request.services.write(perform)
    return {}


async def _require_storage(request: ApiRequest, task_id: str) -> None:
    """Raise 409 if the trial's checkpoint storage is unavailable.

    Not 503: clients would retry indefinitely while the trial holds its slots.
    """

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
            raise RequestError(409, trouble)


async def show_checkpoint(request: ApiRequest) -> dict[str, Any]:
    row = await request.services.read(
        checkpoint_rows.require_checkpoint, request.path_params["checkpoint_uuid"]
    )
    return message(
        bindings.v1GetCheckpointResponse,
        checkpoint=checkpoint_json(row, request.services.secret_names),
    )


async def patch_checkpoints(request: ApiRequest) -> dict[str, Any]:
    """Store which files of each given checkpoint still exist."""
    changes: list[tuple[str, dict[str, int]]] = []
    for item in request.body().items_of("checkpoints") or []:
        if not isinstance(item, dict) or not isinstance(item.get("uuid"), str):
            raise RequestError(400, "checkpoints has an item without uuid; expected uuid and resources.")
        await request.require_checkpoint(item["uuid"], is_change=True)
        wrapped = item.get("resources")
        if isinstance(wrapped, dict):
            inner = wrapped.get("resources")
            changes.append((item["uuid"], _sizes(inner if isinstance(inner, dict) else {})))

    def perform(tx: Transaction) -> None:
        for uuid, resources in changes:
            checkpoint_rows.set_resources(tx, uuid, resources)

    await request.services.write(perform)
    return {}


async def delete_checkpoints(request: ApiRequest) -> dict[str, Any]:
    await _remove(request, ["**/*"])
    return {}


async def remove_files(request: ApiRequest) -> dict[str, Any]:
    """Delete matching files; without patterns, only rescan each checkpoint's files."""
    globs = request.body().texts("checkpointGlobs") or []
    if any(pattern.startswith("/") or ".." in pattern.split("/") for pattern in globs):
        raise RequestError(400, "checkpointGlobs leads out of the checkpoint; expected patterns below it.")
    await _remove(request, globs)
    return {}


async def _remove(request: ApiRequest, globs: list[str]) -> None:
    uuids = request.body().texts("checkpointUuids") or []

    def perform(tx: Transaction) -> None:
        in_use = checkpoint_rows.in_use(tx.connection)
        by_experiment: dict[int, list[str]] = {}
        for uuid in uuids:
            row = checkpoint_rows.require_checkpoint(tx.connection, uuid)
            if uuid in in_use and globs:
                raise RequestError(
                    400,
                    f"checkpoint {uuid} is {in_use[uuid]}; expected one that is not in use. Keep it, or delete the version "
                    "of the model first.",
                )
            by_experiment.setdefault(row.experiment_id, []).append(uuid)
        for experiment_id, chosen in by_experiment.items():
            background_jobs.request(
                tx, "delete_checkpoints", experiment_id, {"uuids": chosen, "globs": globs}
            )

    await request.services.write(perform)


async def set_metadata(request: ApiRequest) -> dict[str, Any]:
    uuid = request.path_params["checkpoint_uuid"]
    given = request.body().fields("checkpoint")
    if given is None:
        raise request.body().wrong("checkpoint", "an object")
    metadata = given.mapping("metadata") or {}

    def perform(tx: Transaction) -> None:
        # The client modifies the metadata it received and sends back the whole mapping.
        before = json.loads(checkpoint_rows.require_checkpoint(tx.connection, uuid).metadata)
        checkpoint_rows.set_metadata(tx, uuid, unmasked(metadata, [before], "the checkpoint's metadata"))

    await request.services.write(perform)
    row = await request.services.read(checkpoint_rows.require_checkpoint, uuid)
    return message(
        bindings.v1PostCheckpointMetadataResponse,
        checkpoint=checkpoint_json(row, request.services.secret_names),
    )


async def list_metrics(request: ApiRequest) -> dict[str, Any]:
    """Return the metric reports of trials that use this checkpoint."""
    uuid, group = request.path_params["checkpoint_uuid"], request.query("metricGroup") or None
    kind = request.query_choice("trialSourceInfoType", bindings.v1TrialSourceInfoType)

    def read(connection: Connection) -> list[metrics.Report]:
        checkpoint_rows.require_checkpoint(connection, uuid)
        return metrics.reports(connection, checkpoint_rows.users_of(connection, uuid, kind), group)

    rows = await request.services.read(read)
    return message(
        bindings.v1GetTrialMetricsByCheckpointResponse, metrics=[report_json(row, group) for row in rows]
    )


async def download(request: ApiRequest) -> StreamingResponse:
    """Stream a checkpoint as the archive format (tar or zip) that ``Accept`` requests."""
    uuid = request.path_params["checkpoint_uuid"]
    row = await request.services.read(checkpoint_rows.require_checkpoint, uuid)
    storage = json.loads(row.experiment_config)["checkpoint_storage"]
    directory = checkpoint_gc.checkpoint_directory(storage, uuid)
    if row.state == "DELETED" or not directory.is_dir():
        raise RequestError(404, f"checkpoint {uuid} has no files any more; expected one that is not deleted.")
    accepted = request.headers.get("accept", "")
    kind = "zip" if "zip" in accepted and "gzip" not in accepted else "tar" if "x-tar" in accepted else "gzip"
    suffix = {"zip": "zip", "tar": "tar", "gzip": "tar.gz"}[kind]
    media = {"zip": "application/zip", "tar": "application/x-tar", "gzip": "application/gzip"}[kind]
    return StreamingResponse(
        _archive(directory, kind),
        media_type=media,
        headers={"Content-Disposition": f'attachment; filename="{uuid}.{suffix}"'},
    )


async def _archive(directory: Path, kind: str) -> AsyncIterator[bytes]:
    """Yield an archive of files; abort the stream if a file becomes unreadable."""
    read_end, write_end = os.pipe()
    problems: list[Exception] = []

    def write() -> None:
        try:
            with os.fdopen(write_end, "wb") as file:
                _write_archive(directory, kind, file)
        except Exception as error:  # noqa: BLE001 - raised below, or the reader has gone
            problems.append(error)

    thread = threading.Thread(target=write, name="dstrial-archive", daemon=True)
    thread.start()
    # The event loop waits on the pipe, so a hanging storage does not block a thread of the shared pool.
    reader = asyncio.StreamReader(_CHUNK_BYTES)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_end, "rb", buffering=0)
    )
    with contextlib.closing(transport):
        while chunk := await reader.read(_CHUNK_BYTES):
            yield chunk
    thread.join()  # has closed its end of the pipe and is about to exit
    if problems:
        raise problems[0]


def _files_below(directory: Path) -> list[Path]:
    """Return the regular files of a tree; rglob() fails on deep trees."""
    found, directories = [], [directory]
    while directories:
        with os.scandir(directories.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    directories.append(Path(entry.path))
                elif entry.is_file(follow_symlinks=False):
                    found.append(Path(entry.path))
    return sorted(found)


def _write_archive(directory: Path, kind: str, file: IO[bytes]) -> None:
    paths = _files_below(directory)
    if kind == "zip":
        # ZIP supports timestamps from 1980 to 2107 and text names only; tar has neither limit.
        with zipfile.ZipFile(file, "w", strict_timestamps=False) as archive:
            for path in paths:
                name = os.fsencode(path.relative_to(directory).as_posix()).decode(errors="backslashreplace")
                info = zipfile.ZipInfo.from_file(path, name, strict_timestamps=False)
                with open_regular(path, is_own=False) as source, archive.open(info, "w") as target:
                    shutil.copyfileobj(source, target)
        return
    with tarfile.open(fileobj=file, mode="w|gz" if kind == "gzip" else "w|") as tar:
        for path in paths:
            with open_regular(path, is_own=False) as source:
                tar.addfile(
                    tar.gettarinfo(arcname=path.relative_to(directory).as_posix(), fileobj=source), source
                )


async def preview_gc(request: ApiRequest) -> dict[str, Any]:
    """Return the checkpoints that the given retention policy would delete."""
    experiment_id = request.path_params["experiment_id"]
    policy = checkpoint_gc.Policy(
        *(request.query_int(name) or 0 for name in ("saveExperimentBest", "saveTrialBest", "saveTrialLatest"))
    )

    def read(connection: Connection) -> dict[str, Any]:
        experiment = experiments.require(connection, experiment_id)
        rows = checkpoint_rows.list_checkpoints(
            connection, experiment_id=experiment_id, states=("COMPLETED",)
        )
        in_use = checkpoint_rows.in_use(connection)
        rows = [row for row in rows if row.uuid not in in_use]
        metric = experiment.searcher_metric
        values = {row.uuid: json.loads(row.validation) if row.validation else {} for row in rows}
        candidates = [
            checkpoint_gc.Candidate(
                row.uuid, row.trial_id, row.steps, as_number(values[row.uuid].get(metric))
            )
            for row in rows
        ]
        chosen = set(
            checkpoint_gc.plan(candidates, policy, smaller_is_better=bool(experiment.smaller_is_better))
        )
        return {
            "metric_name": metric,
            "checkpoints": [
                {
                    "TrialID": row.trial_id,
                    "StepsCompleted": row.steps,
                    "State": row.state,
                    "UUID": row.uuid,
                    "Resources": {path: int(size) for path, size in sizes_as_texts(row.resources).items()},
                    "ValidationMetrics": values[row.uuid],
                    "ReportTime": format_us(row.report_us),
                    "step": {
                        "trial_id": row.trial_id,
                        "total_batches": row.steps,
                        "validation": values[row.uuid] or None,
                    },
                }
                for row in rows
                if row.uuid in chosen
            ],
        }

    return await request.services.read(read)


async def list_checkpoints(request: ApiRequest) -> dict[str, Any]:
    return await _page(request, experiment_id=request.path_params["experiment_id"])


async def list_trial_checkpoints(request: ApiRequest) -> dict[str, Any]:
    return await _page(request, trial_id=request.path_params["trial_id"])


async def _page(
    request: ApiRequest, *, experiment_id: int | None = None, trial_id: int | None = None
) -> dict[str, Any]:
    """Return a page of checkpoints, sorted by an attribute or a validation metric.

    Without an explicit order, the searcher metric is sorted best first. Checkpoints without a value come last.
    """
    sort_by = request.query_choice("sortByAttr", bindings.checkpointv1SortBy)
    metric = request.query("sortByMetric")
    order = request.query_choice("orderBy", bindings.v1OrderBy)
    states = tuple(
        name.removeprefix("STATE_") for name in request.query_choices("states", bindings.checkpointv1State)
    )
    offset, limit = request.query_int("offset"), request.query_int("limit")

    def read(connection: Connection) -> list[checkpoint_rows.CheckpointInfo]:
        return checkpoint_rows.list_checkpoints(
            connection, trial_id=trial_id, experiment_id=experiment_id, states=states
        )

    rows = await request.services.read(read)
    is_descending = order == "ORDER_BY_DESC"
    is_best_first = sort_by == "SORT_BY_SEARCHER_METRIC" or metric is not None
    if is_best_first and order in (None, "ORDER_BY_UNSPECIFIED") and rows:
        is_descending = not rows[0].smaller_is_better

    def key(row: checkpoint_rows.CheckpointInfo) -> Any:
        if is_best_first:
            values = json.loads(row.validation) if row.validation else {}
            value = as_number(values.get(metric or row.searcher_metric))
            return None if value is None or value != value else value
        column = {
            "SORT_BY_UUID": "uuid",
            "SORT_BY_TRIAL_ID": "trial_id",
            "SORT_BY_BATCH_NUMBER": "steps",
            "SORT_BY_STATE": "state",
        }.get(sort_by or "", "report_us")
        return getattr(row, column)

    known = sorted((row for row in rows if key(row) is not None), key=key, reverse=is_descending)
    rows = known + [row for row in rows if key(row) is None]
    page = page_of(len(rows), offset, limit)
    names = request.services.secret_names
    return {
        "checkpoints": [checkpoint_json(row, names) for row in rows[page.start : page.end]],
        "pagination": page.to_json(),
    }


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
    route("GET", "/trials/{trial_id:int}/checkpoints", list_trial_checkpoints, access=TRIAL),
]
