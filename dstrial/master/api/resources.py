"""Usage reports: raw allocations, and sums per day or month.

Source: Determined 0.38.1 for the columns, the kinds of rows and the unit of the sums (slot-seconds).
"""

from __future__ import annotations

import collections
import csv
import dataclasses
import datetime
import io
from collections.abc import Callable, Iterable
from typing import Any

from determined.common.api import bindings
from starlette.responses import Response

from dstrial.errors import RequestError
from dstrial.master.clock import format_us, now_us, parse_time
from dstrial.master.http.fields import shown
from dstrial.master.http.messages import message
from dstrial.master.http.router import USER, ApiRequest, route
from dstrial.master.store import allocations
from dstrial.master.store.database import Connection

_RAW = ("experiment_id", "kind", "username", "labels", "slots", "start_time", "end_time", "seconds")
_ALLOCATIONS = (
    "allocation_id",
    "task_type",
    "username",
    "workspace_name",
    "experiment_id",
    "slots",
    "start_time",
    "end_time",
    "imagepulling_time",
)
_AGGREGATED = ("aggregation_type", "aggregation_key", "date", "seconds")
_MONTHLY = "RESOURCE_ALLOCATION_AGGREGATION_PERIOD_MONTHLY"
_MAX_PERIODS = 4000
_UTC = datetime.timezone.utc


@dataclasses.dataclass(frozen=True, slots=True)
class _Row:
    """A row of the raw report; ``seconds`` is clipped to the requested time range."""

    experiment_id: int | None
    kind: str
    user_id: int | None
    username: str
    labels: tuple[str, ...]
    slots: int
    start_us: int
    end_us: int
    seconds: float


def _time(request: ApiRequest, name: str) -> int:
    try:
        return parse_time(request.query(name) or "")
    except (ValueError, OverflowError) as error:
        raise request.wrong_query(name, "a time such as 2026-01-31T00:00:00Z") from error


def _window(request: ApiRequest) -> tuple[int, int]:
    after_us, before_us = _time(request, "timestampAfter"), _time(request, "timestampBefore")
    if before_us < after_us:
        raise request.wrong_query("timestampBefore", "a time that is not before timestampAfter")
    return after_us, before_us


async def _raw_rows(request: ApiRequest) -> list[_Row]:
    after_us, before_us = _window(request)
    services, now = request.services, now_us()

    def read(connection: Connection) -> list[_Row]:
        rows = []
        for use in allocations.uses(connection, after_us, before_us):
            for kind, start_us, end_us in allocations.spans(connection, use, now):
                overlap_us = min(end_us, before_us) - max(start_us, after_us)
                if overlap_us > 0:
                    rows.append(
                        _Row(
                            use.experiment_id, kind, use.user_id, use.username, use.labels, use.num_slots,
                            start_us, end_us, overlap_us / 1e6,
                        )
                    )  # fmt: skip
        return rows

    rows = await services.read(read)
    overlap_us = min(now, before_us) - max(services.start_us, after_us)
    if overlap_us > 0:
        agent = _Row(
            None,
            "agent",
            None,
            services.agent_id,
            (),
            len(services.slots),
            services.start_us,
            now,
            overlap_us / 1e6,
        )
        rows.append(agent)
    return sorted(rows, key=lambda row: row.start_us)


async def show_raw(request: ApiRequest) -> dict[str, Any]:
    return {
        "resourceEntries": [
            message(
                bindings.v1ResourceAllocationRawEntry,
                kind=row.kind,
                startTime=format_us(row.start_us),
                endTime=format_us(row.end_us),
                experimentId=row.experiment_id,
                username=row.username,
                userId=row.user_id,
                labels=list(row.labels),
                seconds=row.seconds,
                slots=row.slots,
            )
            for row in await _raw_rows(request)
        ]
    }


async def raw_csv(request: ApiRequest) -> Response:
    return _csv(
        _RAW,
        (
            (
                row.experiment_id or 0,
                row.kind,
                row.username,
                ",".join(label.replace("\\", "\\\\").replace(",", "\\,") for label in row.labels),
                row.slots,
                format_us(row.start_us),
                format_us(row.end_us),
                f"{row.seconds:f}",
            )
            for row in await _raw_rows(request)
        ),
    )


async def allocations_csv(request: ApiRequest) -> Response:
    after_us, before_us = _window(request)
    found = await request.services.read(allocations.uses, after_us, before_us)
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
                "" if use.end_us is None else format_us(use.end_us),
                "0.0",
            )
            for use in found
        ),
    )


def _day(request: ApiRequest, name: str, is_monthly: bool) -> datetime.date:
    text = request.query(name) or ""
    try:
        return datetime.date.fromisoformat(f"{text}-01" if is_monthly and len(text) == 7 else text)
    except ValueError as error:
        raise request.wrong_query(name, "a date, YYYY-MM-DD or by months YYYY-MM") from error


def _next(day: datetime.date, is_monthly: bool) -> datetime.date:
    if not is_monthly:
        return day + datetime.timedelta(days=1)
    return (day.replace(day=28) + datetime.timedelta(days=4)).replace(day=1)


def _us(day: datetime.date) -> int:
    return int(datetime.datetime(day.year, day.month, day.day, tzinfo=_UTC).timestamp()) * 1_000_000


async def _aggregated(request: ApiRequest) -> list[dict[str, Any]]:
    period = request.query_choice("period", bindings.v1ResourceAllocationAggregationPeriod)
    is_monthly = period == _MONTHLY
    first, last = _day(request, "startDate", is_monthly), _day(request, "endDate", is_monthly)
    if is_monthly:
        first = first.replace(day=1)
    if last < first:
        raise request.wrong_query("endDate", "a date that is not before startDate")
    last = min(last, datetime.datetime.now(_UTC).date())
    if (last - first).days > _MAX_PERIODS * (28 if is_monthly else 1):
        raise RequestError(
            400,
            f"startDate is {shown(request.query('startDate'))}; expected at most {_MAX_PERIODS} periods before endDate. "
            "Ask for less at a time.",
        )
    pool_name, now = request.services.settings.pool_name, now_us()

    def read(connection: Connection) -> list[dict[str, Any]]:
        entries, day = [], first
        while day <= last:
            following = _next(day, is_monthly)
            start_us, end_us = _us(day), _us(following)
            found = allocations.uses(connection, start_us, end_us)
            entries.append(_entry(found, day, (start_us, end_us), is_monthly, pool_name, now))
            day = following
        return entries

    return await request.services.read(read)


def _entry(
    found: Iterable[allocations.AllocationUsage],
    day: datetime.date,
    window_us: tuple[int, int],
    is_monthly: bool,
    pool_name: str,
    now: int,
) -> dict[str, Any]:
    by_user: dict[str, float] = collections.defaultdict(float)
    by_label: dict[str, float] = collections.defaultdict(float)
    total = 0.0
    for use in found:
        end_us = min(now if use.end_us is None else use.end_us, window_us[1])
        seconds = max(end_us - max(use.start_us, window_us[0]), 0) / 1e6 * use.num_slots
        total += seconds
        by_user[use.username] += seconds
        for label in use.labels:
            by_label[label] += seconds
    return message(
        bindings.v1ResourceAllocationAggregatedEntry,
        period=_MONTHLY if is_monthly else bindings.v1ResourceAllocationAggregationPeriod.DAILY.value,
        periodStart=day.isoformat()[:7] if is_monthly else day.isoformat(),
        seconds=total,
        byUsername=dict(by_user),
        byExperimentLabel=dict(by_label),
        byResourcePool={pool_name: total} if by_user else {},
    )


async def show_aggregated(request: ApiRequest) -> dict[str, Any]:
    return message(
        bindings.v1ResourceAllocationAggregatedResponse, resourceEntries=await _aggregated(request)
    )


async def aggregated_csv(request: ApiRequest) -> Response:
    groups: tuple[tuple[str, Callable[[dict[str, Any]], dict[str, float]]], ...] = (
        ("experiment_label", lambda entry: entry["byExperimentLabel"]),
        ("username", lambda entry: entry["byUsername"]),
        ("resource_pool", lambda entry: entry["byResourcePool"]),
        ("total", lambda entry: {"total": entry["seconds"]}),
    )
    return _csv(
        _AGGREGATED,
        (
            (kind, key, entry["periodStart"], f"{seconds:f}")
            for entry in await _aggregated(request)
            for kind, sums in groups
            for key, seconds in sorted(sums(entry).items())
        ),
    )


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
