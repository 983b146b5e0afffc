"""Routes for logs of trials and tasks: stream, follow, and delete expired logs."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from typing import Any

from determined.common.api import bindings

from dstrial.errors import RequestError
from dstrial.master.clock import format_us, now_us
from dstrial.master.http.responses import Stream, message, ndjson
from dstrial.master.http.router import ADMIN, TRIAL, ApiRequest, route, writes
from dstrial.master.http.serializers import as_data
from dstrial.master.services import Services
from dstrial.master.store import tasks
from dstrial.master.store import trials as trial_rows
from dstrial.master.store.database import Connection, Transaction
from dstrial.master.store.reports import logs

_CHUNK_LINES = 2000  # lines per read of the database
_FOLLOW_WAIT_S = 30.0  # longest wait for new lines before the task's state is read again
_LATE_S = 3.0  # a detached run sends its last log lines up to this long after its end


def _filter(request: ApiRequest, trial_id: int | None, task_id: str | None) -> logs.LogFilter:
    levels = [
        name.removeprefix("LOG_LEVEL_") for name in request.query_choices("levels", bindings.v1LogLevel)
    ]
    limit = request.query_int("limit") or 0
    return logs.LogFilter(
        trial_id=trial_id,
        task_id=task_id,
        limit=limit if limit > 0 else None,
        is_descending=request.is_descending,
        allocation_ids=tuple(request.queries("allocationIds")),
        agent_ids=tuple(request.queries("agentIds")),
        agent_id=request.services.agent_id,
        container_ids=tuple(request.queries("containerIds")),
        rank_ids=tuple(request.query_ints("rankIds")),
        sources=tuple(request.queries("sources")),
        stdtypes=tuple(request.queries("stdtypes")),
        levels=tuple(levels),
        before_us=request.query_time_us("timestampBefore"),
        after_us=request.query_time_us("timestampAfter"),
        search_text=request.query("searchText") or "",
    )


async def stream_trial_logs(request: ApiRequest) -> Stream:
    trial_id = request.path_params["trial_id"]
    await request.services.read(trial_rows.require, trial_id)
    wanted = _filter(request, trial_id, None)
    return ndjson(_lines(request, wanted, f"logs:trial:{trial_id}"))


async def stream_task_logs(request: ApiRequest) -> Stream:
    task_id = request.path_params["task_id"]
    await request.services.read(require_task, task_id)
    wanted = _filter(request, None, task_id)
    return ndjson(_lines(request, wanted, f"logs:{task_id}"))


def require_task(connection: Connection, task_id: str) -> tasks.Task:
    row = tasks.get(connection, task_id)
    if row is None:
        raise RequestError(404, f"task {task_id[:80]!r} is not found; expected one of `det task list`.")
    return row


def _is_over(connection: Connection, wanted: logs.LogFilter, *, is_detached: bool) -> bool:
    """Return whether a log is complete: all tasks that write to the log have ended.

    A detached run's log is complete ``_LATE_S`` seconds later, because the run sends its last lines late.
    """
    before_us = now_us() - int(_LATE_S * 1e6) if is_detached else now_us()
    return tasks.is_over(connection, wanted.trial_id, wanted.task_id, before_us)


async def _lines(
    request: ApiRequest, wanted: logs.LogFilter, topic: str
) -> AsyncIterator[list[dict[str, Any]]]:
    services = request.services
    follows = bool(request.query_flag("follow")) and not wanted.is_descending
    left = wanted.limit
    after: int | None = None
    if wanted.is_descending:
        rows = await services.read(logs.query, wanted)
        yield [_line_json(services, wanted, row) for row in rows]
        return
    is_detached = await services.read(tasks.is_detached, wanted.trial_id, wanted.task_id)
    wait_s = _LATE_S if is_detached else _FOLLOW_WAIT_S
    with services.pubsub.follow(topic.__eq__) as follower:
        while left is None or left > 0:
            is_over = await services.read(_is_over, wanted, is_detached=is_detached)
            limit = _CHUNK_LINES if left is None else min(_CHUNK_LINES, left)
            rows = await services.read(logs.query, dataclasses.replace(wanted, after_id=after, limit=limit))
            if rows:
                after = rows[-1].id
                left = None if left is None else left - len(rows)
                yield [_line_json(services, wanted, row) for row in rows]
            if len(rows) == limit:
                continue
            if not follows or is_over:
                return
            await follower.next(wait_s)


def _line_json(services: Services, wanted: logs.LogFilter, row: logs.StoredLine) -> dict[str, Any]:
    common = {
        "id": str(row.id),
        "level": f"LOG_LEVEL_{row.level or 'UNSPECIFIED'}",
        "message": as_data(logs.format_message(row)),
        "timestamp": format_us(row.time_us),
        "agentId": services.agent_id if row.allocation_id else None,
        "containerId": row.container_id,
        "log": as_data(logs.shown_text(row)),
        "rankId": row.rank,
        "source": row.source,
        "stdtype": row.stdtype,
    }
    if wanted.trial_id is not None:
        return message(bindings.v1TrialLogsResponse, trialId=wanted.trial_id, **common)
    return message(
        bindings.v1TaskLogsResponse, taskId=wanted.task_id, allocationId=row.allocation_id, **common
    )


@writes
def clean_up(tx: Transaction, request: ApiRequest) -> dict[str, Any]:
    removed = logs.forget_old(tx, request.services.settings.log_retention_days)
    return message(bindings.v1CleanupLogsResponse, removedCount=str(removed))


routes = [
    route("POST", "/cleanup_logs", clean_up, access=ADMIN),
    route("GET", "/trials/{trial_id:int}/logs", stream_trial_logs, access=TRIAL),
    route("GET", "/tasks/{task_id}/logs", stream_task_logs, access=TRIAL),
]
