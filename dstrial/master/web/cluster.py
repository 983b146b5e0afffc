"""JSON routes for the web page's cluster views: nodes, slots, queue, tasks."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from dstrial.master.api.commands import task_state
from dstrial.master.api.jobs import Entry, engine_jobs, entries
from dstrial.master.backends.backend import Node
from dstrial.master.backends.status import shown_engine
from dstrial.master.clock import format_us
from dstrial.master.http.router import USER, ApiRequest, route
from dstrial.master.http.serializers import proxy_ports, time_or_none
from dstrial.master.services import Services
from dstrial.master.store import commands, jobs, tasks
from dstrial.master.store.database import Connection
from dstrial.master.store.nodes import agent_key, index_of

MAX_TASKS = 1000  # newest tasks in a response, besides all active ones

Json: TypeAlias = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class SlotCounts:
    """Numbers of slots that can be used now."""

    usable: int  # enabled, on an enabled node that is up
    free: int  # usable and without work


def count_slots(nodes: Sequence[Node], disabled: Mapping[int, bool], used: frozenset[int]) -> SlotCounts:
    usable = [
        slot.id
        for node in nodes
        for slot in node.slots
        if node.why_down is None and agent_key(node.id) not in disabled and slot.id not in disabled
    ]
    return SlotCounts(len(usable), sum(slot_id not in used for slot_id in usable))


def pending_reason(wanted: int, num_waiting: int, num_ahead: int, counts: SlotCounts) -> str:
    """Return text that tells users why a job waits for slots; empty if it does not.

    Args:
        wanted: slots that each trial or command of the job needs.
        num_waiting: how many trials or commands of the job wait.
        num_ahead: number of jobs before this job in the queue.
        counts: the cluster's slots.
    """
    if not num_waiting:
        return ""
    each = f"{wanted} slot{'' if wanted == 1 else 's'}"
    who = f"waits for {each}" if num_waiting == 1 else f"{num_waiting} wait for {each} each"
    if wanted > counts.usable:
        return f"{who}: only {counts.usable} can be used now"
    ahead = f", {num_ahead} ahead" if num_ahead else ""
    return f"{who}: {counts.free} of {counts.usable} free{ahead}"


def _holder_json(row: tasks.ActiveAllocation) -> Json:
    return {
        "allocation": row.id,
        "task": row.task_id,
        "kind": "TRIAL" if row.trial_id else "COMMAND",
        "trial": row.trial_id or None,
        "experiment": row.experiment_id or None,
        "title": row.name,
        "state": "STOPPING"
        if row.kill_us or row.preempt_us
        else "RUNNING"
        if row.state == "RUNNING"
        else "STARTING",
        "since": format_us(row.start_us),
        "slots": len(row.slots),
    }


def _node_json(node: Node, disabled: Mapping[int, bool], holders: Mapping[int, str]) -> Json:
    key = agent_key(node.id)
    return {
        "name": node.name,
        "address": node.address,
        "down": node.why_down,
        "since": time_or_none(node.since_us or None),
        "enabled": key not in disabled,
        "draining": disabled.get(key, False),
        "slots": [
            {
                "slot": index_of(slot.id),
                "kind": slot.kind,
                "brand": slot.brand,
                "uuid": slot.uuid,
                "enabled": slot.id not in disabled,
                "draining": disabled.get(slot.id, False),
                "holder": holders.get(slot.id),
            }
            for slot in node.slots
        ],
    }


def _queued_json(entry: Entry, num_ahead: int, counts: SlotCounts, engine_text: str) -> Json:
    if isinstance(entry, commands.CommandInfo):
        num_held, wanted = len(json.loads(entry.slots or "[]")), entry.num_slots
        num_running = int(entry.allocation_id is not None)
        num_waiting = 1 - num_running
        own: Json = {"kind": entry.kind, "name": entry.description, "task": entry.task_id, "experiment": None}
        username = entry.username
    else:
        num_held, wanted = entry.num_slots or 0, entry.slots_per_trial
        num_running = entry.num_allocations or 0
        num_waiting = max(0, (entry.num_active or 0) - num_running)
        own = {"kind": "EXPERIMENT", "name": entry.name, "task": None, "experiment": entry.id}
        username = entry.owner_name
    reason = engine_text or pending_reason(wanted, num_waiting, num_ahead, counts)
    if not reason and not num_running:
        reason = "its searcher has no trial to run now"
    return {
        "id": entry.job_id,
        **own,
        "user": username,
        "running": num_running,
        "waiting": num_waiting,
        "held": num_held,
        "wanted": wanted,
        "priority": entry.priority,
        "ahead": num_ahead,
        "reason": reason,
        "since": format_us(entry.start_us),
    }


def _read_cluster(services: Services, connection: Connection) -> Json:
    nodes = services.backend.nodes()
    active = tasks.active(connection)
    by_slot = {slot_id: row.id for row in active for slot_id in row.slots}
    disabled = jobs.disabled_slots(connection, tuple(slot.id for node in nodes for slot in node.slots))
    counts = count_slots(nodes, disabled, frozenset(by_slot))
    engine = shown_engine(services.state_dir)
    return {
        "pool": services.settings.pool_name,
        "backend": services.engine or ("hosts" if services.hosts else "local"),
        "usable": counts.usable,
        "free": counts.free,
        "nodes": [_node_json(node, disabled, by_slot) for node in nodes],
        "holders": {row.id: _holder_json(row) for row in active},
        "queue": [
            _queued_json(entry, num_ahead, counts, engine_jobs(services, connection, entry).strip(" []"))
            for num_ahead, entry in enumerate(entries(connection))
        ],
        "engine": None
        if engine is None
        else {"name": engine.name, "away": engine.why_away, "jobs": engine.jobs},
    }


async def get_cluster(request: ApiRequest) -> Json:
    services = request.services
    return await services.read(lambda connection: _read_cluster(services, connection))


def _task_state(row: commands.CommandInfo) -> str:
    if row.state in commands.ENDED or row.state == "PAUSED":
        return row.state
    return task_state(row).removeprefix("STATE_").replace("TERMINATING", "STOPPING")


def _http_ports(row: commands.CommandInfo) -> list[int]:
    """Return the ports on which a task serves HTTP, from its config."""
    return [one["proxy_port"] for one in proxy_ports(row.config) if not one.get("proxy_tcp")]


def _task_json(row: commands.CommandInfo) -> Json:
    is_up = row.allocation_id is not None
    services = [f"/proxy/{row.task_id}/"] if row.kind == "TENSORBOARD" else []
    services += [f"/proxy/{row.task_id}:{port}/" for port in _http_ports(row)]
    return {
        "id": row.task_id,
        "kind": row.kind,
        "name": row.description,
        "state": _task_state(row),
        "ready": bool(row.is_ready),
        "user": row.username,
        "slots": len(json.loads(row.slots)) if row.slots else 0,
        "wanted": row.num_slots,
        "priority": row.priority,
        "start": format_us(row.start_us),
        "end": time_or_none(row.end_us),
        "experiments": json.loads(row.experiment_ids),
        "trials": json.loads(row.trial_ids),
        "services": services if is_up else [],
        "reason": row.stop_reason or row.exit_status or "",
        "pausable": bool(row.is_pausable),
    }


async def get_tasks(request: ApiRequest) -> Json:
    def read(connection: Connection) -> list[Json]:
        return [_task_json(row) for row in commands.newest(connection, MAX_TASKS)]

    return {"tasks": await request.services.read(read)}


routes = [
    route("GET", "//page/tasks", get_tasks, access=USER),
    route("GET", "//page/cluster", get_cluster, access=USER),
]
