"""Routes for usage reports: time intervals, or daily or monthly sums.

Reports are JSON or CSV. Columns, kinds of rows and unit of the sums (slot-seconds) are as in Determined 0.38.1.
"""

from __future__ import annotations

import collections
import csv
import datetime
import io
from collections.abc import Iterable
from typing import Any

from determined.common.api import bindings
from starlette.responses import Response

from dstrial.errors import RequestError
from dstrial.master.clock import format_us, now_us
from dstrial.master.http.fields import shown
from dstrial.master.http.responses import message
from dstrial.master.http.router import USER, ApiRequest, reads, route
from dstrial.master.http.serializers import time_or_none
from dstrial.master.store import allocations
from dstrial.master.store.database import Connection

_RAW = ("experiment_id", "kind", "username", "labels", "slots", "start_time", "end_time", "seconds")
_ALLOCATIONS = (
    *("allocation_id", "task_type", "username", "workspace_name", "experiment_id", "slots"),
    *("start_time", "end_time", "imagepulling_time"),
)
_AGGREGATED = ("aggregation_type", "aggregation_key", "date", "seconds")
_GROUPS = (
    ("experiment_label", "byExperimentLabel"),
    ("username", "byUsername"),
    ("resource_pool", "byResourcePool"),
)
_DAILY = bindings.v1ResourceAllocationAggregationPeriod.DAILY.value
_MONTHLY = bindings.v1ResourceAllocationAggregationPeriod.MONTHLY.value
_MAX_PERIODS = 4000  # days or months per request
_UTC = datetime.timezone.utc


def _time_us(request: ApiRequest, name: str) -> int:
    found = request.query_time_us(name)
    if found is None:
        raise request.wrong_query(name, "a time such as 2026-01-31T00:00:00Z")
    return found


def _window(request: ApiRequest) -> tuple[int, int]:
    after_us, before_us = _time_us(request, "timestampAfter"), _time_us(request, "timestampBefore")
    if before_us < after_us:
        raise request.wrong_query("timestampBefore", "a time that is not before timestampAfter")
    return after_us, before_us


def _raw(connection: Connection, request: ApiRequest) -> list[dict[str, Any]]:
    """Return ``v1ResourceAllocationRawEntry`` items sorted by start time.

    There is one item per interval of an allocation, for example of training or validation, and one for the time that the
    master has run. An item's ``seconds`` is the part of its interval within the request's time range.
    """
    after_us, before_us = _window(request)
    services, now = request.services, now_us()
    entries = []

    def add(kind: str, start_us: int, end_us: int, **fields: Any) -> None:
        overlap_us = min(end_us, before_us) - max(start_us, after_us)
        if overlap_us > 0:
            entries.append(
                message(
                    bindings.v1ResourceAllocationRawEntry,
                    kind=kind,
                    startTime=format_us(start_us),
                    endTime=format_us(end_us),
                    seconds=overlap_us / 1e6,
                    **fields,
                )
            )

    for use in allocations.uses(connection, after_us, before_us):
        for span in allocations.spans(connection, use, now):
            add(
                *span,
                experimentId=use.experiment_id,
                username=use.username,
                userId=use.user_id,
                labels=list(use.labels),
                slots=use.num_slots,
            )
    add(
        *("agent", services.start_us, now),
        experimentId=None,
        username=services.agent_id,
        userId=None,
        labels=[],
        slots=len(services.slots),
    )
    return sorted(entries, key=lambda entry: str(entry["startTime"]))


@reads
def show_raw(connection: Connection, request: ApiRequest) -> dict[str, Any]:
    return {"resourceEntries": _raw(connection, request)}


@reads
def raw_csv(connection: Connection, request: ApiRequest) -> Response:
    return _csv(
        _RAW,
        (
            (
                entry["experimentId"] or 0,
                entry["kind"],
                entry["username"],
                ",".join(label.replace("\\", "\\\\").replace(",", "\\,") for label in entry["labels"]),
                entry["slots"],
                entry["startTime"],
                entry["endTime"],
                f"{entry['seconds']:f}",
            )
            for entry in _raw(connection, request)
        ),
    )


@reads
def allocations_csv(connection: Connection, request: ApiRequest) -> Response:
    return _csv(
        _ALLOCATIONS,
        (
            (
                use.allocation_id,
                use.kind,
                use.username,
                use.workspace_name,
                use.experiment_id or "",
                use.num_slots,
                format_us(use.start_us),
                time_or_none(use.end_us) or "",
                "0.0",
            )
            for use in allocations.uses(connection, *_window(request))
        ),
    )


def _day(request: ApiRequest, name: str, is_monthly: bool) -> datetime.date:
    text = request.query(name) or ""
    try:
        return datetime.date.fromisoformat(f"{text}-01" if is_monthly and len(text) == 7 else text)
    except ValueError as error:
        raise request.wrong_query(name, "a date, YYYY-MM-DD or by months YYYY-MM") from error


def _next_start(day: datetime.date, is_monthly: bool) -> datetime.date:
    if not is_monthly:
        return day + datetime.timedelta(days=1)
    return (day.replace(day=28) + datetime.timedelta(days=4)).replace(day=1)


def _start_us(day: datetime.date) -> int:
    return int(datetime.datetime(day.year, day.month, day.day, tzinfo=_UTC).timestamp()) * 1_000_000


def _aggregated(connection: Connection, request: ApiRequest) -> list[dict[str, Any]]:
    period = request.query_choice("period", bindings.v1ResourceAllocationAggregationPeriod)
    is_monthly = period == _MONTHLY
    day, last = _day(request, "startDate", is_monthly), _day(request, "endDate", is_monthly)
    if is_monthly:
        day = day.replace(day=1)
    if last < day:
        raise request.wrong_query("endDate", "a date that is not before startDate")
    last = min(last, datetime.datetime.now(_UTC).date())
    if (last - day).days > _MAX_PERIODS * (28 if is_monthly else 1):
        raise RequestError(
            400,
            f"startDate is {shown(request.query('startDate'))}; expected at most {_MAX_PERIODS} periods before endDate. "
            "Ask for less at a time.",
        )
    entries = []
    while day <= last:
        following = _next_start(day, is_monthly)
        start_us, end_us = _start_us(day), _start_us(following)
        uses = allocations.uses(connection, start_us, end_us)
        entries.append(
            message(
                bindings.v1ResourceAllocationAggregatedEntry,
                period=_MONTHLY if is_monthly else _DAILY,
                periodStart=day.isoformat()[:7] if is_monthly else day.isoformat(),
                **_sums(uses, start_us, end_us, request.services.settings.pool_name),
            )
        )
        day = following
    return entries


def _sums(
    uses: Iterable[allocations.AllocationUsage], start_us: int, end_us: int, pool_name: str
) -> dict[str, Any]:
    by_user: dict[str, float] = collections.defaultdict(float)
    by_label: dict[str, float] = collections.defaultdict(float)
    now = now_us()
    for use in uses:
        until_us = min(now if use.end_us is None else use.end_us, end_us)
        seconds = max(until_us - max(use.start_us, start_us), 0) / 1e6 * use.num_slots
        by_user[use.username] += seconds
        for label in use.labels:
            by_label[label] += seconds
    total = sum(by_user.values())
    return {
        "seconds": total,
        "byUsername": dict(by_user),
        "byExperimentLabel": dict(by_label),
        "byResourcePool": {pool_name: total} if by_user else {},
    }


@reads
def show_aggregated(connection: Connection, request: ApiRequest) -> dict[str, Any]:
    entries = _aggregated(connection, request)
    return message(bindings.v1ResourceAllocationAggregatedResponse, resourceEntries=entries)


@reads
def aggregated_csv(connection: Connection, request: ApiRequest) -> Response:
    rows: list[tuple[Any, ...]] = []
    for entry in _aggregated(connection, request):
        sums = [(kind, *item) for kind, field in _GROUPS for item in sorted(entry[field].items())]
        sums.append(("total", "total", entry["seconds"]))
        rows += [(kind, key, entry["periodStart"], f"{seconds:f}") for kind, key, seconds in sums]
    return _csv(_AGGREGATED, rows)


def _csv(header: Iterable[str], rows: Iterable[Iterable[Any]]) -> Response:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return Response(text.getvalue(), media_type="text/csv")


_PATH = "/resources/allocation"
routes = [
    route("GET", f"{_PATH}/raw", show_raw, access=USER),
    route("GET", f"{_PATH}/aggregated", show_aggregated, access=USER),
    route("GET", f"/{_PATH}/raw", raw_csv, access=USER),
    route("GET", f"/{_PATH}/aggregated", aggregated_csv, access=USER),
    route("GET", f"/{_PATH}/allocations-csv", allocations_csv, access=USER),
]
