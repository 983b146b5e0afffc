"""The job queue: experiments and commands, running or pending, in order."""

from __future__ import annotations

import json
from typing import Any, TypeAlias

from determined.common.api import bindings

from dstrial.errors import RequestError
from dstrial.master.clock import format_us
from dstrial.master.http.fields import Fields
from dstrial.master.http.messages import message, page_of
from dstrial.master.http.router import USER, ApiRequest, route
from dstrial.master.lifecycle import commands as life
from dstrial.master.services import Services
from dstrial.master.store import commands, jobs, trials
from dstrial.master.store.commands import Command
from dstrial.master.store.database import Connection, Transaction
from dstrial.master.store.experiments import Experiment

_MAX_PRIORITY = 99
_MAX_SHOWN_JOBS = 3


Entry: TypeAlias = "jobs.QueuedExperiment | commands.CommandInfo"
"""A queue entry."""


def _state(entry: Entry) -> str:
    runs = entry.allocation_id if isinstance(entry, commands.CommandInfo) else entry.num_allocations
    return "STATE_SCHEDULED" if runs else "STATE_QUEUED"


def entries(connection: Connection) -> list[Entry]:
    found: list[Entry] = [*jobs.queued_experiments(connection), *commands.queued(connection)]
    return sorted(found, key=lambda entry: (entry.priority, entry.queue_position))


def engine_jobs(services: Services, connection: Connection, entry: Entry) -> str:
    """Describe the entry's Slurm or Ray jobs; empty without an engine."""
    if services.engine is None:
        return ""
    keys: list[int] | list[str] = (
        [entry.task_id] if isinstance(entry, commands.CommandInfo) else trials.open_ids(connection, entry.id)
    )
    texts = [text for key in keys if (text := services.backend.job_text(key))]
    # Pending jobs first: users list the queue to see those.
    shown = sorted(texts, key=lambda text: ": running" in text)[:_MAX_SHOWN_JOBS]
    if len(texts) > len(shown):
        shown.append(f"{len(texts) - len(shown)} more jobs")
    return f" [{'; '.join(shown)}]" if shown else ""


def _command_json(
    row: commands.CommandInfo, num_ahead: int, pool_name: str, jobs_text: str = ""
) -> dict[str, Any]:
    return message(
        bindings.v1Job,
        jobId=row.job_id,
        entityId=row.task_id,
        type=f"TYPE_{row.kind}",
        name=row.description + jobs_text,
        username=row.username,
        userId=row.owner_id,
        submissionTime=format_us(row.start_us),
        requestedSlots=row.num_slots,
        allocatedSlots=len(json.loads(row.slots or "[]")),
        isPreemptible=False,
        priority=row.priority,
        weight=1,
        progress=0,
        resourcePool=pool_name,
        workspaceId=row.workspace_id,
        summary={"state": _state(row), "jobsAhead": num_ahead},
    )


def job_json(
    row: jobs.QueuedExperiment, num_ahead: int, pool_name: str, jobs_text: str = ""
) -> dict[str, Any]:
    """Return a queued experiment as a ``v1Job``.

    ``jobs_text`` is appended to the name, the only free-text column of ``det job list``.
    """
    num_slots = row.num_slots or 0
    return message(
        bindings.v1Job,
        jobId=row.job_id,
        entityId=str(row.id),
        type="TYPE_EXPERIMENT",
        name=row.name + jobs_text,
        username=row.owner_name,
        userId=row.owner_id,
        submissionTime=format_us(row.start_us),
        requestedSlots=max((row.num_active or 0) * row.slots_per_trial, num_slots),
        allocatedSlots=num_slots,
        isPreemptible=False,
        priority=row.priority,
        weight=row.weight,
        progress=row.progress,
        resourcePool=pool_name,
        workspaceId=row.workspace_id,
        summary={"state": _state(row), "jobsAhead": num_ahead},
    )


async def _page(request: ApiRequest) -> tuple[list[dict[str, Any]], dict[str, int]]:
    services = request.services
    pool_name = services.settings.pool_name
    asked = request.query("resourcePool")
    states = request.query_choices("states", bindings.jobv1State)
    is_descending = request.query_choice("orderBy", bindings.v1OrderBy) == "ORDER_BY_DESC"

    def read(connection: Connection) -> list[tuple[Entry, str]]:
        return [(entry, engine_jobs(services, connection, entry)) for entry in entries(connection)]

    found = [
        _command_json(entry, num_ahead, pool_name, text)
        if isinstance(entry, commands.CommandInfo)
        else job_json(entry, num_ahead, pool_name, text)
        for num_ahead, (entry, text) in enumerate(await services.read(read))
        if asked in (None, "", pool_name) and (not states or _state(entry) in states)
    ]
    if is_descending:
        found.reverse()
    page = page_of(len(found), request.query_int("offset"), request.query_int("limit"))
    return found[page.start : page.end], page.to_json()


async def list_jobs_v2(request: ApiRequest) -> dict[str, Any]:
    found, pagination = await _page(request)
    return {"jobs": [{"full": job, "limited": None} for job in found], "pagination": pagination}


async def update(request: ApiRequest) -> dict[str, Any]:
    updates = request.body().field_list("updates") or []
    pool_name = request.services.settings.pool_name

    def write(tx: Transaction) -> None:
        for one in updates:
            _update(tx, one, pool_name)

    await request.services.write(write)
    return {}


def _update(tx: Transaction, control: Fields, pool_name: str) -> None:
    row = _find(tx, control.required_text("jobId"))
    priority = control.integer("priority", 1, _MAX_PRIORITY)
    weight = control.number("weight")
    pool = control.text("resourcePool")
    ahead_of, behind_of = control.text("aheadOf"), control.text("behindOf")
    if pool not in (None, "", pool_name):
        raise control.wrong("resourcePool", f"{pool_name!r}, the only pool")
    if weight is not None and not 0 < weight <= 1e6:
        raise control.wrong("weight", "a positive number of at most 1e6")
    position = row.queue_position
    anchor_id = ahead_of or behind_of
    if anchor_id:
        anchor = _find(tx, anchor_id)
        priority = anchor.priority
        position = jobs.position_beside(tx.connection, row.job_id, anchor, is_ahead=bool(ahead_of))
    if isinstance(row, Command):
        jobs.move_command(tx, row.task_id, position)
        life.set_priority(tx, row.task_id, row.priority if priority is None else priority)
        return
    jobs.move_experiment(tx, row, position, priority, weight)


def _find(tx: Transaction, job_id: str) -> Experiment | Command:
    row = jobs.experiment_of(tx.connection, job_id) or jobs.command_of(tx.connection, job_id)
    if row is None:
        raise RequestError(404, f"job {job_id[:80]!r} does not exist; see `det job list`")
    return row


routes = [
    route("POST", "/job-queues", update, access=USER),
    route("GET", "/job-queues-v2", list_jobs_v2, access=USER),
]
