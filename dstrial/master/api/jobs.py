"""Routes for the job queue of running and pending experiments and commands."""

from __future__ import annotations

import json
from typing import Any, TypeAlias

from determined.common.api import bindings

from dstrial.errors import RequestError
from dstrial.master.clock import format_us
from dstrial.master.http.fields import Fields
from dstrial.master.http.responses import message
from dstrial.master.http.router import USER, ApiRequest, reads, route, writes
from dstrial.master.lifecycle import commands as life
from dstrial.master.services import Services
from dstrial.master.store import commands, jobs, trials
from dstrial.master.store.commands import Command
from dstrial.master.store.database import Connection, Transaction
from dstrial.master.store.experiments import Experiment

_MAX_PRIORITY = 99  # the least urgent
_MAX_SHOWN_JOBS = 3  # Slurm or Ray jobs in the text of a queue entry


Entry: TypeAlias = "jobs.QueuedExperiment | commands.CommandInfo"
"""An experiment or a command in the job queue."""


def _state(entry: Entry) -> str:
    runs = entry.allocation_id if isinstance(entry, commands.CommandInfo) else entry.num_allocations
    return "STATE_SCHEDULED" if runs else "STATE_QUEUED"


def entries(connection: Connection) -> list[Entry]:
    found: list[Entry] = [*jobs.queued_experiments(connection), *commands.queued(connection)]
    return sorted(found, key=lambda entry: (entry.priority, entry.queue_position))


def engine_jobs(services: Services, connection: Connection, entry: Entry) -> str:
    """Return text on a queue entry's Slurm or Ray jobs; "" if there are no such jobs.

    The text is in square brackets. It begins with a space, because it is appended to the entry's name.
    """
    if services.engine is None:
        return ""
    keys: list[int] | list[str] = (
        [entry.task_id] if isinstance(entry, commands.CommandInfo) else trials.open_ids(connection, entry.id)
    )
    texts = [text for key in keys if (text := services.backend.job_text(key))]
    # Pending jobs come first: users list the queue to see why jobs are pending.
    shown = sorted(texts, key=lambda text: ": running" in text)[:_MAX_SHOWN_JOBS]
    if len(texts) > len(shown):
        shown.append(f"{len(texts) - len(shown)} more jobs")
    return f" [{'; '.join(shown)}]" if shown else ""


def _job_json(services: Services, entry: Entry, num_ahead: int, jobs_text: str) -> dict[str, Any]:
    """Return a queue entry as ``v1Job``, with ``jobs_text`` appended to its name.

    ``num_ahead`` is the number of queue entries before this entry.
    """
    own: dict[str, Any]  # ``jobs_text`` is in the name, the only free-text column of ``det job list``
    if isinstance(entry, commands.CommandInfo):
        own = {
            "entityId": entry.task_id,
            "type": f"TYPE_{entry.kind}",
            "name": entry.description + jobs_text,
            "username": entry.username,
            "requestedSlots": entry.num_slots,
            "allocatedSlots": len(json.loads(entry.slots or "[]")),
            "weight": 1,
            "progress": 0,
        }
    else:
        num_slots = entry.num_slots or 0
        own = {
            "entityId": str(entry.id),
            "type": "TYPE_EXPERIMENT",
            "name": entry.name + jobs_text,
            "username": entry.owner_name,
            "requestedSlots": max((entry.num_active or 0) * entry.slots_per_trial, num_slots),
            "allocatedSlots": num_slots,
            "weight": entry.weight,
            "progress": entry.progress,
        }
    return message(
        bindings.v1Job,
        jobId=entry.job_id,
        userId=entry.owner_id,
        submissionTime=format_us(entry.start_us),
        isPreemptible=False,
        priority=entry.priority,
        resourcePool=services.settings.pool_name,
        workspaceId=entry.workspace_id,
        summary={"state": _state(entry), "jobsAhead": num_ahead},
        **own,
    )


@reads
def list_jobs(connection: Connection, request: ApiRequest) -> dict[str, Any]:
    services = request.services
    states = request.query_choices("states", bindings.jobv1State)
    found = [
        _job_json(services, entry, num_ahead, engine_jobs(services, connection, entry))
        for num_ahead, entry in enumerate(entries(connection))
        if request.query("resourcePool") in (None, "", services.settings.pool_name)
        and (not states or _state(entry) in states)
    ]
    rows, pagination = request.page(found[::-1] if request.is_descending else found)
    return {"jobs": [{"full": job, "limited": None} for job in rows], "pagination": pagination}


@writes
def update(tx: Transaction, request: ApiRequest) -> None:
    for one in request.body().field_list("updates") or []:
        _update_job(tx, one, request.services.settings.pool_name)


def _update_job(tx: Transaction, control: Fields, pool_name: str) -> None:
    row = _require_job(tx, control.required_text("jobId"))
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
        anchor = _require_job(tx, anchor_id)
        priority = anchor.priority
        position = jobs.position_beside(tx.connection, row.job_id, anchor, is_ahead=bool(ahead_of))
    if isinstance(row, Command):
        jobs.move_command(tx, row.task_id, position)
        life.set_priority(tx, row.task_id, row.priority if priority is None else priority)
        return
    jobs.move_experiment(tx, row, position, priority, weight)


def _require_job(tx: Transaction, job_id: str) -> Experiment | Command:
    row = jobs.experiment_of(tx.connection, job_id) or jobs.command_of(tx.connection, job_id)
    if row is None:
        raise RequestError(404, f"job {job_id[:80]!r} does not exist; see `det job list`")
    return row


routes = [
    route("POST", "/job-queues", update, access=USER),
    route("GET", "/job-queues-v2", list_jobs, access=USER),
]
