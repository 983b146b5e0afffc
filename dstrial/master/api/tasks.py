"""Tasks: list active ones, show one with its allocations."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from determined.common.api import bindings

from dstrial.config.experiment_config.command import DEFAULT_PRIORITY
from dstrial.config.secrets import SecretNames, masked_json
from dstrial.errors import RequestError
from dstrial.master.api.agents import device_json, devices_of
from dstrial.master.clock import format_us
from dstrial.master.http.messages import message
from dstrial.master.http.router import TRIAL, USER, ApiRequest, route
from dstrial.master.services import Services
from dstrial.master.store import background_jobs, commands, tasks
from dstrial.master.store.allocations import Allocation
from dstrial.master.store.database import Connection
from dstrial.master.store.nodes import node_of

_STATES = {"ASSIGNED": "STATE_STARTING", "RUNNING": "STATE_RUNNING", "TERMINATED": "STATE_TERMINATED"}


def _ports(row: tasks.ActiveAllocation) -> list[dict[str, Any]]:
    ports = [
        message(
            bindings.v1ProxyPortConfig,
            port=one["proxy_port"],
            proxyTcp=bool(one.get("proxy_tcp")),
            serviceId=f"{row.task_id}:{one['proxy_port']}",
            unauthenticated=False,
        )
        for one in (json.loads(row.config).get("environment") or {}).get("proxy_ports") or []
    ]
    tensorboard = row.ports.get("TENSORBOARD_PORT")
    if tensorboard is not None:
        one = message(
            bindings.v1ProxyPortConfig,
            port=tensorboard,
            proxyTcp=False,
            serviceId=row.task_id,
            unauthenticated=False,
        )
        ports.append(one)
    return ports


def _summary(
    services: Services,
    row: tasks.ActiveAllocation,
    names: Mapping[int, str],
    devices: Mapping[int, dict[str, Any]],
) -> dict[str, Any]:
    slots = row.slots
    own_devices: dict[str, Any] = {} if slots else {services.agent_id: {"devices": []}}
    for slot in slots:
        name = names.get(node_of(slot), services.agent_id)
        own_devices.setdefault(name, {"devices": []})["devices"].append(device_json(devices, slot))
    resources = message(
        bindings.v1ResourcesSummary,
        resourcesId=row.resources_id,
        resourcesType="docker-container",
        allocationId=row.id,
        containerId=row.resources_id,
        agentDevices=own_devices,
    )
    return message(
        bindings.v1AllocationSummary,
        taskId=row.task_id,
        allocationId=row.id,
        name=row.name,
        registeredTime=format_us(row.start_us),
        resources=[resources],
        slotsNeeded=len(slots),
        resourcePool=services.settings.pool_name,
        schedulerType="priority",
        priority=row.priority,
        proxyPorts=_ports(row),
    )


def _collection_json(services: Services, row: background_jobs.BackgroundJob) -> dict[str, Any]:
    """Return a background file job as a checkpoint-GC task; it has no process."""
    task_id = f"checkpoint-gc-{row.id}"
    return message(
        bindings.v1AllocationSummary,
        taskId=task_id,
        allocationId=f"{task_id}.1",
        name=f"Checkpoint GC (Experiment {row.experiment_id})",
        registeredTime=format_us(row.created_us),
        resources=[],
        slotsNeeded=0,
        resourcePool=services.settings.pool_name,
        schedulerType="priority",
        priority=DEFAULT_PRIORITY,
        proxyPorts=[],
    )


async def _summaries(services: Services) -> dict[str, dict[str, Any]]:
    active, collections = await services.read(
        lambda connection: (tasks.active(connection), background_jobs.collections(connection))
    )
    names = {node.id: node.name for node in services.backend.nodes()}
    devices = devices_of(services)
    found = [_summary(services, row, names, devices) for row in active] + [
        _collection_json(services, row) for row in collections
    ]
    return {one["allocationId"]: one for one in found}


async def list_tasks(request: ApiRequest) -> dict[str, Any]:
    return {"allocationIdToSummary": await _summaries(request.services)}


def _find_task(connection: Connection, task_id: str) -> tuple[tasks.Task, list[Allocation]]:
    row = tasks.get(connection, task_id)
    if row is None:
        raise RequestError(404, f"task {task_id[:80]!r} does not exist; see `det task list`")
    return row, tasks.allocations_of(connection, task_id)


def allocation_json(row: Allocation) -> dict[str, Any]:
    return message(
        bindings.v1Allocation,
        taskId=row.task_id,
        allocationId=row.id,
        state=_STATES[row.state],
        isReady=bool(row.is_ready),
        startTime=format_us(row.start_us),
        endTime=None if row.end_us is None else format_us(row.end_us),
        slots=len(row.slots),
        exitReason=row.exit_reason,
        statusCode=row.exit_code,
    )


def submitted(row: commands.CommandInfo, names: SecretNames) -> str:
    """Return a task's config as JSON: a generic task's as submitted, else merged."""
    return masked_json(row.original_config or row.config, names)


async def show_task(request: ApiRequest) -> dict[str, Any]:
    task, allocations = await request.services.read(_find_task, request.path_params["task_id"])
    row = await request.services.read(commands.get, task.id)
    more: dict[str, Any] = {}
    if row is not None and row.kind == "GENERIC":
        more = {
            "taskState": f"GENERIC_TASK_STATE_{row.state}",
            "config": submitted(row, request.services.secret_names),
            "noPause": not row.is_pausable,
            "parentId": row.parent_id,
            "forkedFrom": row.forked_from,
        }
    return {
        "task": message(
            bindings.v1Task,
            taskId=task.id,
            taskType=f"TASK_TYPE_{task.type}",
            startTime=format_us(task.start_us),
            endTime=None if task.end_us is None else format_us(task.end_us),
            allocations=[allocation_json(one) for one in allocations],
            **more,
        )
    }


routes = [
    route("GET", "/tasks", list_tasks, access=USER),
    route("GET", "/tasks/{task_id}", show_task, access=TRIAL),
]
