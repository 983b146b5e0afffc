"""Routes for the master's version, config, health and log."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import itertools
import logging
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from determined.common.api import bindings

from dstrial.errors import RequestError
from dstrial.master.http.fields import Fields
from dstrial.master.http.responses import Stream, message, ndjson
from dstrial.master.http.router import ADMIN, PUBLIC, USER, ApiRequest, route
from dstrial.master.services import VERSION
from dstrial.master.store.database import SqlError, ping

CLUSTER_NAME = "dstrial"

_FOLLOW_PERIOD_S = 0.3  # interval of reads of the log file
_CHUNK_LINES = 1000  # lines per read
# Time, level and message of a line of the master's log; lines of a traceback do not match.
_LINE = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}) ([A-Z]+) (.*)", re.DOTALL)
_PYTHON_LEVELS = {
    "TRACE": logging.DEBUG,
    "DEBUG": logging.DEBUG,
    "INFO": logging.INFO,
    "WARNING": logging.WARNING,
    "ERROR": logging.ERROR,
    "CRITICAL": logging.CRITICAL,
}  # level of Determined's API without its prefix -> level of Python's logging


async def show_info(request: ApiRequest) -> dict[str, Any]:
    """Return the version and cluster id, which every ``det`` command requests first."""
    services = request.services
    return {
        "version": VERSION,
        "master_id": services.master_id,
        "cluster_id": services.cluster_id,
        "cluster_name": CLUSTER_NAME,
        "telemetry": {"enabled": False, "segment_key": ""},
    }


async def show_health(request: ApiRequest) -> dict[str, Any]:
    if trouble := request.services.describe_trouble():
        raise RequestError(503, trouble)
    try:
        await request.services.read(ping)
    except SqlError as error:
        raise RequestError(503, f"the database does not answer ({error}); see `dstrial logs`") from error
    up = bindings.HealthStatus.up.value
    return {"status": up, "database": up, "resource_managers": []}


async def show_master(request: ApiRequest) -> dict[str, Any]:
    services = request.services
    return message(
        bindings.v1GetMasterResponse,
        version=VERSION,
        masterId=services.master_id,
        clusterId=services.cluster_id,
        clusterName=CLUSTER_NAME,
        hasCustomLogo=False,
        strictJobQueueControl=False,
        rbacEnabled=False,
        telemetryEnabled=False,
        userManagementEnabled=True,
        featureSwitches=[],
        ssoProviders=[],
        branding="determined",
        externalLoginUri="",
        externalLogoutUri="",
        product="PRODUCT_UNSPECIFIED",
    )


async def show_config(request: ApiRequest) -> dict[str, Any]:
    services = request.services
    return {"config": {**services.settings.as_config(), "port": int(services.address.rpartition(":")[2])}}


async def patch_config(request: ApiRequest) -> dict[str, Any]:
    """Change the running master's log level; a colour is accepted and ignored."""
    body = request.body()
    if isinstance(body.get("fieldMask"), str):  # protobuf's JSON form of a field mask
        paths = body["fieldMask"].split(",")
    else:
        paths = (body.fields("fieldMask") or Fields({})).texts("paths")
    log = (body.fields("config") or Fields({})).fields("log")
    unknown = sorted(set(paths or ()) - {"log", "log.level", "log.color"})
    if not paths or log is None or unknown:
        raise RequestError(
            400,
            f"the field mask is {unknown or paths!r}; expected log.level or log.color with its value. Send these.",
        )
    changes: dict[str, Any] = {}
    if "log" in paths or "log.level" in paths:
        level = (log.choice("level", bindings.v1LogLevel) or "LOG_LEVEL_INFO").removeprefix("LOG_LEVEL_")
        if level not in _PYTHON_LEVELS:
            raise log.wrong("level", "a level")
        logging.getLogger().setLevel(_PYTHON_LEVELS[level])
        changes["log_level"] = level.lower()
    request.services.settings = dataclasses.replace(request.services.settings, **changes)
    return {}


async def stream_logs(request: ApiRequest) -> Stream:
    """Stream the master's log from line ``offset`` on.

    A negative offset counts from the end. If the query has ``follow``, the stream continues with new lines.
    """
    offset, limit = request.query_int("offset") or 0, request.query_int("limit") or 0
    if limit < 0:
        raise RequestError(400, f"limit is {limit}; expected at least 0. Send 0 for no limit.")
    reader = _LogReader(request.services.state_dir / "master.log")
    await request.services.run(lambda: reader.skip_to(offset))
    return ndjson(_entries(request, reader, limit or None))


async def _entries(
    request: ApiRequest, reader: _LogReader, num_left: int | None
) -> AsyncIterator[list[dict[str, Any]]]:
    while num_left is None or num_left > 0:
        entries = (await request.services.run(reader.read))[:num_left]
        if entries:
            num_left = None if num_left is None else num_left - len(entries)
            yield [{"logEntry": entry} for entry in entries]
        elif not request.query_flag("follow"):
            return
        else:
            await asyncio.sleep(_FOLLOW_PERIOD_S)


class _LogReader:
    """Reads the master's growing log file; each line becomes a ``v1LogEntry``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._line_idx = 0
        self._position = 0  # bytes read so far
        self._time = datetime.datetime.fromtimestamp(0, datetime.timezone.utc)
        self._level = "LOG_LEVEL_INFO"

    def skip_to(self, offset: int) -> None:
        """Skip ``offset`` lines; if negative, skip all but the last ``-offset`` lines."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            if offset < 0:
                offset = max(0, sum(1 for _ in file) + offset)
                file.seek(0)
            for line in itertools.islice(file, offset):
                self._line_idx += 1
                self._position += len(line)

    def read(self) -> list[dict[str, Any]]:
        if not self._path.exists():
            return []
        entries = []
        with self._path.open("rb") as file:
            file.seek(self._position)
            for line in itertools.islice(file, _CHUNK_LINES):
                if not line.endswith(b"\n"):
                    break
                self._position += len(line)
                entries.append(self._entry(line.decode("utf-8", errors="replace").rstrip("\n")))
        return entries

    def _entry(self, text: str) -> dict[str, Any]:
        """Return a line as ``v1LogEntry``.

        A line without a time, as in a traceback, gets time and level of the line before.
        """
        match = _LINE.fullmatch(text)
        if match is not None:
            self._time = datetime.datetime.fromisoformat(match[1]).astimezone(datetime.timezone.utc)
            self._level = f"LOG_LEVEL_{match[2]}" if match[2] in _PYTHON_LEVELS else "LOG_LEVEL_INFO"
        entry = message(
            bindings.v1LogEntry,
            id=self._line_idx,
            message=text if match is None else match[3],
            timestamp=self._time.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            level=self._level,
        )
        self._line_idx += 1
        return entry


routes = [
    route("GET", "//info", show_info, access=PUBLIC),
    route("GET", "//health", show_health, access=PUBLIC),
    route("GET", "/master", show_master, access=PUBLIC),
    route("GET", "/master/config", show_config, access=ADMIN),
    route("PATCH", "/master/config", patch_config, access=ADMIN),
    route("GET", "/master/logs", stream_logs, access=USER),
]
