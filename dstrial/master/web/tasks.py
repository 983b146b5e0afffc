"""JSON for the page's view of commands, TensorBoards and generic tasks."""

from __future__ import annotations

import json
from typing import Any, TypeAlias

from dstrial.master.api.commands import task_state
from dstrial.master.clock import format_us
from dstrial.master.http.router import USER, ApiRequest, route
from dstrial.master.http.serializers import time_or_none
from dstrial.master.store import commands
from dstrial.master.store.database import Connection

MAX_TASKS = 1000  # the newest ones, besides all active ones

Json: TypeAlias = dict[str, Any]


def _state(row: commands.CommandInfo) -> str:
    if row.state in commands.ENDED or row.state == "PAUSED":
        return row.state
    return task_state(row).removeprefix("STATE_").replace("TERMINATING", "STOPPING")


def _ports(row: commands.CommandInfo) -> list[int]:
    """Return the ports of a task that the proxy serves under separate URLs."""
    config = json.loads(row.config)
    found = (config.get("environment") or {}).get("proxy_ports") or []
    return [one["proxy_port"] for one in found if not one.get("proxy_tcp")]


def task_json(row: commands.CommandInfo) -> Json:
    is_up = row.allocation_id is not None
    services = [f"/proxy/{row.task_id}/"] if row.kind == "TENSORBOARD" else []
    services += [f"/proxy/{row.task_id}:{port}/" for port in _ports(row)]
    return {
        "id": row.task_id,
        "kind": row.kind,
        "name": row.description,
        "state": _state(row),
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
        """Build the response in the reader thread, not in the event loop."""
        return [task_json(row) for row in commands.newest(connection, MAX_TASKS)]

    return {"tasks": await request.services.read(read)}


routes = [route("GET", "//page/tasks", get_tasks, access=USER)]
