"""Routes for logs on the web page: a page of lines, or a whole log as a file."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import AsyncIterator
from typing import Any

from starlette.responses import StreamingResponse

from dstrial.errors import RequestError
from dstrial.master.api.logs import require_task
from dstrial.master.http.router import USER, ApiRequest, route
from dstrial.master.store.database import Connection
from dstrial.master.store.reports import logs
from dstrial.master.store.reports.logs import LogKey, PageFilter
from dstrial.master.web.views import require_trial

_LINES = 200  # per response, by default
_CHUNK = 1000  # lines per read of the database
_MAX_TEXT = 1000  # characters of the text to find


def _log_of(connection: Connection, trial_id: int | None, task_id: str | None) -> LogKey:
    """Return which stored log a trial or task writes; the tasks of a trial share one."""
    if trial_id is not None:
        require_trial(connection, trial_id)
        return LogKey(trial_id=trial_id)
    row = require_task(connection, task_id or "")
    return LogKey(trial_id=row.trial_id) if row.trial_id else LogKey(task_id=row.id)


async def _asked_log(request: ApiRequest) -> LogKey:
    trial_id, task_id = request.query_int("trial"), request.query("task")
    if (trial_id is None) == (task_id is None):
        raise RequestError(400, "the query names no log; expected either trial or task. Send one of them.")
    return await request.services.read(_log_of, trial_id, task_id)


def _asked_id(request: ApiRequest, name: str) -> int | None:
    text = request.query(name)
    if not text:
        return None
    if re.fullmatch("[0-9]{1,18}", text) is None:
        raise request.wrong_query(name, "the id of a line")
    return int(text)


def _asked_lines(request: ApiRequest) -> PageFilter:
    before, after = _asked_id(request, "before"), _asked_id(request, "after")
    if before is not None and after is not None:
        raise RequestError(400, "the query has before and after; expected one of them. Ask twice.")
    level = request.query("level") or None
    if level is not None and level not in logs.LEVELS:
        raise request.wrong_query("level", f"one of {', '.join(logs.LEVELS)}")
    limit = request.query_int("limit") or _LINES
    return PageFilter(
        before=before,
        after=after,
        limit=min(max(limit, 1), logs.MAX_LINES),
        level=level,
        ranks=tuple(request.query_ints("rank"))[:1000],
        text=(request.query("text") or "")[:_MAX_TEXT],
    )


def _line_json(line: logs.ShownLine) -> dict[str, Any]:
    found = {
        "id": line.id,
        "ms": line.time_us // 1000,
        "level": line.level,
        "rank": line.rank,
        "source": line.source,
        "stdtype": line.stdtype,
        "text": line.text,  # control characters are made visible when the JSON is written
    }
    return {**found, "bytes": line.num_bytes} if line.is_cut else found


async def get_page(request: ApiRequest) -> dict[str, Any]:
    """Return a log's newest lines, or lines just ``before`` or ``after`` a line id.

    Query filters are ``level``, ``rank`` (repeatable; -1 for lines without a rank) and ``text``. Requests scan a limited number
    of lines; ``searchedTo`` is the line id to continue from (null at the log's end). ``last`` is the newest line's id.
    """
    wanted = _asked_lines(request)
    log = await _asked_log(request)
    found = await request.services.read(logs.page, log, wanted)
    return {
        "lines": [_line_json(line) for line in found.lines],
        "searchedTo": found.searched_to,
        "last": found.last,
    }


def _name(log: LogKey) -> str:
    of = f"trial-{log.trial_id}" if log.trial_id is not None else f"task-{log.task_id}"
    return re.sub(r"[^\w.-]", "_", of, flags=re.ASCII)


async def get_file(request: ApiRequest) -> StreamingResponse:
    """Return a whole log as a file, in the format of ``det trial logs``."""
    log = await _asked_log(request)
    services = request.services
    # Stop at the current last line, even if the log is still growing.
    last = (await services.read(logs.page, log, PageFilter(limit=1))).last
    wanted = logs.LogFilter(trial_id=log.trial_id, task_id=log.task_id, limit=_CHUNK)

    async def content() -> AsyncIterator[bytes]:
        after = 0
        while after < last:
            rows = await services.read(logs.query, dataclasses.replace(wanted, after_id=after))
            if not rows:
                return
            after = rows[-1].id
            yield "".join(logs.format_message(row) for row in rows if row.id <= last).encode()

    return StreamingResponse(
        content(),
        media_type="text/plain; charset=utf-8",
        headers={
            "Content-Disposition": f'attachment; filename="{_name(log)}.log"',
            "X-Content-Type-Options": "nosniff",
            "Cache-Control": "no-store",
        },
    )


routes = [
    route("GET", "//page/logs", get_page, access=USER),
    route("GET", "//page/logs/file", get_file, access=USER),
]
