"""Tasks: what runs now, one task with its allocations, and its model definition."""

from __future__ import annotations

import base64
import json
import re
from typing import Any

from determined.common.api import bindings

from dstrial.config.experiment_config.command import DEFAULT_PRIORITY
from dstrial.config.secrets import SecretNames, masked_json
from dstrial.errors import RequestError
from dstrial.master.api.agents import device_json
from dstrial.master.clock import format_us
from dstrial.master.http.messages import message
from dstrial.master.http.router import TRIAL, USER, ApiRequest, route
from dstrial.master.services import Services
from dstrial.master.store import allocations as allocation_rows
from dstrial.master.store import background_jobs, commands, tasks
from dstrial.master.store.allocations import Allocation
from dstrial.master.store.database import Connection
from dstrial.master.store.nodes import node_of

_SNAKE = re.compile("[A-Z]")
_STATES = {"ASSIGNED": "STATE_STARTING", "RUNNING": "STATE_RUNNING", "TERMINATED": "STATE_TERMINATED"}


def _ports(row: tasks.LivingAllocation) -> list[dict[str, Any]]:
    """Return the ports of an allocation that the proxy leads to."""
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
    tensorboard = json.loads(row.ports).get("TENSORBOARD_PORT")
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


def _summary(services: Services, row: tasks.LivingAllocation) -> dict[str, Any]:
    slots = json.loads(row.slots)
    names = {node.id: node.name for node in services.backend.nodes()}
    devices: dict[str, Any] = {} if slots else {services.agent_id: {"devices": []}}
    for slot in slots:
        name = names.get(node_of(slot), services.agent_id)
        devices.setdefault(name, {"devices": []})["devices"].append(device_json(services, slot))
    resources = message(
        bindings.v1ResourcesSummary,
        resourcesId=row.resources_id,
        resourcesType="docker-container",
        allocationId=row.id,
        containerId=row.resources_id,
        agentDevices=devices,
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


def _collection(services: Services, row: background_jobs.BackgroundJob) -> dict[str, Any]:
    """Return work on files as Determined's checkpoint task; it has no process here."""
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
    """Return what runs now, by allocation."""
    living, collections = await services.read(
        lambda connection: (tasks.living(connection), background_jobs.collections(connection))
    )
    found = [_summary(services, row) for row in living] + [_collection(services, row) for row in collections]
    return {one["allocationId"]: one for one in found}


async def list_tasks(request: ApiRequest) -> dict[str, Any]:
    """``GET tasks``: the living allocations, and checkpoint collections."""
    return {"allocationIdToSummary": await _summaries(request.services)}


async def list_tasks_at_root(request: ApiRequest) -> dict[str, Any]:
    """``GET //tasks``: the same by allocation, in the form of older clients.

    Source: Determined 0.38.1, e2e_tests, ``sess.get("tasks").json()``; names of fields as ``sproto.AllocationSummary`` has them.
    """
    return {
        allocation_id: {_SNAKE.sub(_underscored, name): _snake(value) for name, value in one.items()}
        for allocation_id, one in (await _summaries(request.services)).items()
    }


def _underscored(found: re.Match[str]) -> str:
    return f"_{found[0].lower()}"


def _snake(value: Any) -> Any:
    """Return a list's objects with field names in snake case; anything else unchanged.

    What lies deeper is told apart by agents' names, and stays.
    """
    if not isinstance(value, list):
        return value
    return [{_SNAKE.sub(_underscored, name): part for name, part in one.items()} for one in value]


async def count_tasks(request: ApiRequest) -> dict[str, Any]:
    """``GET tasks/count``: commands and TensorBoards that have not ended."""
    counts = await request.services.read(commands.count_living)
    return message(
        bindings.v1GetActiveTasksCountResponse,
        commands=counts.get("COMMAND", 0),
        notebooks=0,
        shells=0,
        tensorboards=counts.get("TENSORBOARD", 0),
    )


def _find_task(connection: Connection, task_id: str) -> tuple[tasks.Task, list[Allocation]]:
    row = tasks.get(connection, task_id)
    if row is None:
        raise RequestError(404, f"task {task_id[:80]!r} does not exist; see `det task list`")
    return row, tasks.allocations_of(connection, task_id)


def allocation_json(row: Allocation) -> dict[str, Any]:
    """Return a row of ``allocations`` as the protocol has it."""
    return message(
        bindings.v1Allocation,
        taskId=row.task_id,
        allocationId=row.id,
        state=_STATES[row.state],
        isReady=bool(row.is_ready),
        startTime=format_us(row.start_us),
        endTime=None if row.end_us is None else format_us(row.end_us),
        slots=len(json.loads(row.slots)),
        exitReason=row.exit_reason,
        statusCode=row.exit_code,
    )


def submitted(row: commands.CommandInfo, names: SecretNames) -> str:
    """Return a generic task's config as submitted, JSON; an old release's is complete."""
    return masked_json(row.original_config or row.config, names)


async def show_task(request: ApiRequest) -> dict[str, Any]:
    """``GET tasks/{id}``: the task and its allocations, the latest first."""
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


def _model_definition(connection: Connection, task_id: str) -> bytes:
    _find_task(connection, task_id)
    return tasks.model_definition(connection, task_id)


async def show_context_directory(request: ApiRequest) -> dict[str, Any]:
    """``GET tasks/{id}/context_directory``: a gzip tar in base64, empty for none."""
    tgz = await request.services.read(_model_definition, request.path_params["task_id"])
    return {"b64Tgz": base64.b64encode(tgz).decode()}


async def show_accelerators(request: ApiRequest) -> dict[str, Any]:
    """``GET tasks/{id}/acceleratorData``: the accelerators of each allocation.

    They are as it said, else as they were given to it.
    """
    task_id, services = request.path_params["task_id"], request.services

    def read(connection: Connection) -> tuple[list[Allocation], list[allocation_rows.Accelerators]]:
        _, allocations = _find_task(connection, task_id)
        return allocations, allocation_rows.accelerators_of_task(connection, task_id)

    allocations, told = await services.read(read)
    found = []
    for row in allocations:
        of_row = [one for one in told if one.allocation_id == row.id]
        for one in of_row or _given(services, row):
            found.append(
                message(
                    bindings.v1AcceleratorData,
                    allocationId=row.id,
                    containerId=one.container_id,
                    nodeName=one.node_name,
                    taskId=task_id,
                    acceleratorType=one.type,
                    acceleratorUuids=json.loads(one.uuids),
                    resourcePool=services.settings.pool_name,
                )
            )
    return message(bindings.v1GetTaskAcceleratorDataResponse, acceleratorData=found)


def _given(services: Services, row: Allocation) -> list[allocation_rows.Accelerators]:
    """Return the slots of an allocation, by node.

    Those that this master does not offer have no name.
    """
    slots = json.loads(row.slots)
    known = {slot.id: slot for slot in services.slots}
    found = []
    for node_id in dict.fromkeys(map(node_of, slots)):
        here = [known[one] for one in slots if node_of(one) == node_id and one in known]
        kind = here[0].kind if here else ""
        uuids = json.dumps([slot.uuid for slot in here])
        found.append(
            allocation_rows.Accelerators(row.id, row.resources_id, services.node_name(node_id), kind, uuids)
        )
    return found


routes = [
    route("GET", "/tasks", list_tasks, access=USER),
    route("GET", "//tasks", list_tasks_at_root, access=USER),
    route("GET", "/tasks/count", count_tasks, access=USER),
    route("GET", "/tasks/{task_id}", show_task, access=TRIAL),
    route("GET", "/tasks/{task_id}/acceleratorData", show_accelerators, access=TRIAL),
    route("GET", "/tasks/{task_id}/context_directory", show_context_directory, access=TRIAL),
]
