"""Routes of ``det task``: list and show tasks; create, kill, pause generic tasks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from determined.common.api import bindings

from dstrial.config.documents import read_yaml_text
from dstrial.config.secrets import SecretNames, masked_json, unmasked
from dstrial.errors import RequestError
from dstrial.master.api.agents import device_json, devices_of
from dstrial.master.api.commands import MAX_BODY_BYTES, validated_command
from dstrial.master.api.logs import require_task
from dstrial.master.backends.model_definition import pack
from dstrial.master.clock import format_us
from dstrial.master.http.fields import Fields
from dstrial.master.http.responses import message
from dstrial.master.http.router import TRIAL, USER, ApiRequest, reads, route, writes
from dstrial.master.http.serializers import proxy_ports, time_or_none
from dstrial.master.lifecycle import commands as life
from dstrial.master.services import Services
from dstrial.master.store import commands, projects, tasks
from dstrial.master.store.allocations import Allocation
from dstrial.master.store.commands import NewCommand
from dstrial.master.store.database import Connection, Transaction
from dstrial.master.store.nodes import node_of

_STATES = {"ASSIGNED": "STATE_STARTING", "RUNNING": "STATE_RUNNING", "TERMINATED": "STATE_TERMINATED"}
_GENERIC = ("GENERIC",)


def _proxy_ports_json(row: tasks.ActiveAllocation) -> list[dict[str, Any]]:
    configured = proxy_ports(row.config)
    ports = [
        (one["proxy_port"], bool(one.get("proxy_tcp")), f"{row.task_id}:{one['proxy_port']}")
        for one in configured
    ]
    tensorboard = row.ports.get("TENSORBOARD_PORT")
    if tensorboard is not None:
        ports.append((tensorboard, False, row.task_id))
    return [
        message(bindings.v1ProxyPortConfig, port=port, proxyTcp=is_tcp, serviceId=name, unauthenticated=False)
        for port, is_tcp, name in ports
    ]


def _allocation_summary(
    services: Services,
    row: tasks.ActiveAllocation,
    names: Mapping[int, str],
    devices: Mapping[int, dict[str, Any]],
) -> dict[str, Any]:
    by_agent: dict[str, Any] = {} if row.slots else {services.agent_id: {"devices": []}}
    for slot in row.slots:
        name = names.get(node_of(slot), services.agent_id)
        by_agent.setdefault(name, {"devices": []})["devices"].append(device_json(devices, slot))
    resources = message(
        bindings.v1ResourcesSummary,
        resourcesId=row.resources_id,
        resourcesType="docker-container",
        allocationId=row.id,
        containerId=row.resources_id,
        agentDevices=by_agent,
    )
    return message(
        bindings.v1AllocationSummary,
        taskId=row.task_id,
        allocationId=row.id,
        name=row.name,
        registeredTime=format_us(row.start_us),
        resources=[resources],
        slotsNeeded=len(row.slots),
        priority=row.priority,
        proxyPorts=_proxy_ports_json(row),
        resourcePool=services.settings.pool_name,
        schedulerType="priority",
    )


@reads
def list_tasks(connection: Connection, request: ApiRequest) -> dict[str, Any]:
    services = request.services
    names = {node.id: node.name for node in services.backend.nodes()}
    devices = devices_of(services)
    found = [_allocation_summary(services, row, names, devices) for row in tasks.active(connection)]
    return {"allocationIdToSummary": {one["allocationId"]: one for one in found}}


def _allocation_json(row: Allocation) -> dict[str, Any]:
    return message(
        bindings.v1Allocation,
        taskId=row.task_id,
        allocationId=row.id,
        state=_STATES[row.state],
        isReady=bool(row.is_ready),
        startTime=format_us(row.start_us),
        endTime=time_or_none(row.end_us),
        slots=len(row.slots),
        exitReason=row.exit_reason,
        statusCode=row.exit_code,
    )


def _submitted_config(row: commands.CommandInfo, names: SecretNames) -> str:
    """Return the config submitted for a task, as JSON with masked secrets."""
    return masked_json(row.original_config or row.config, names)


@reads
def show_task(connection: Connection, request: ApiRequest) -> dict[str, Any]:
    task = require_task(connection, request.path_params["task_id"])
    row = commands.get(connection, task.id)
    more: dict[str, Any] = {}
    if row is not None and row.kind == "GENERIC":
        more = {
            "taskState": f"GENERIC_TASK_STATE_{row.state}",
            "config": _submitted_config(row, request.services.secret_names),
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
            endTime=time_or_none(task.end_us),
            allocations=[_allocation_json(one) for one in tasks.allocations_of(connection, task.id)],
            **more,
        )
    }


async def create(request: ApiRequest) -> dict[str, Any]:
    body, services = request.body(), request.services
    forked_from, parent_id = body.text("forkedFrom") or None, body.text("parentId") or None
    if parent_id is not None:
        await services.read(commands.require, parent_id, _GENERIC)
    forked = None if forked_from is None else await services.read(commands.require, forked_from, _GENERIC)
    known = [] if forked is None else [json.loads(forked.config)]
    given = await _config_of(request, body, forked)
    spec = await validated_command(request, given, "GENERIC", None, *known)
    # A fork's config contains masked secrets: restore them from the forked task.
    original = unmasked(given, [*known, spec.config], "the config")
    project = await services.read(projects.require, body.integer("projectId") or projects.DEFAULT_ID)
    projects.refuse_shut(project, "take another task")
    new = NewCommand(
        "GENERIC",
        spec,
        request.user.id,
        project.workspace_id,
        await _context_tgz(request, body, forked_from, parent_id),
        is_pausable=not body.flag("noPause"),
        parent_id=parent_id,
        forked_from=forked_from,
        original=original,
    )
    task_id = await services.write(lambda tx: life.create(tx, new))
    return message(bindings.v1CreateGenericTaskResponse, taskId=task_id, warnings=[])


async def _config_of(
    request: ApiRequest, body: Fields, forked: commands.CommandInfo | None
) -> dict[str, Any]:
    text = body.text("config") or ""
    if not text.strip() and forked is not None:
        assert forked.original_config is not None
        original: dict[str, Any] = json.loads(forked.original_config)
        return original
    document = await request.services.check(lambda: read_yaml_text(text, "the task's config"))
    given = document.value or {}
    if not isinstance(given, dict):
        raise body.wrong("config", "a mapping in YAML")
    return given


async def _context_tgz(
    request: ApiRequest, body: Fields, forked_from: str | None, parent_id: str | None
) -> bytes:
    """Return a new task's files as tar.gz: uploaded files, or those of another task.

    Without an upload, the files are copied from task ``parent_id`` if the request says ``inheritContext``, else from task
    ``forked_from``. If ``forked_from`` is None, there are no files.
    """
    services = request.services
    files = [dict(file) for file in body.field_list("contextDirectory") or []]
    inherits = bool(body.flag("inheritContext"))
    if inherits and (parent_id is None or files):
        raise RequestError(
            400,
            "inheritContext is true; expected a parentId with it, and no files. Pass --parent, and no --context.",
        )
    source = parent_id if inherits else forked_from
    if files or source is None:
        return await services.run(lambda: pack(files))
    tgz = await services.read(commands.context, source)
    if tgz is None:
        days = services.settings.log_retention_days
        kept = "" if days is None or days < 0 else f", now {days}"
        raise RequestError(
            400,
            f"the context of task {source} is deleted; expected that of a task that ended within "
            f"retention_policy.log_retention_days{kept} (the master's settings). Make the task anew with `det task create`.",
        )
    return tgz


@reads
def show_config(connection: Connection, request: ApiRequest) -> dict[str, Any]:
    row = commands.require(connection, request.path_params["task_id"])
    return message(
        bindings.v1GetGenericTaskConfigResponse, config=_submitted_config(row, request.services.secret_names)
    )


@writes
def kill(tx: Transaction, request: ApiRequest) -> None:
    """Kill a task and its child tasks; with ``killFromRoot``, its whole tree of tasks.

    The request is rejected if the task is COMPLETED or CANCELED, and its child tasks have ended too. Source: Determined 0.38.1,
    KillGenericTask ("cannot cancel task … as it is in state").
    """
    task_id = commands.require(tx.connection, request.path_params["task_id"]).task_id
    if request.body().flag("killFromRoot"):
        task_id = commands.root(tx.connection, task_id)
    states = [commands.require(tx.connection, one).state for one in commands.tree(tx.connection, task_id)]
    if states[0] in ("COMPLETED", "CANCELED") and all(state in commands.ENDED for state in states):
        raise RequestError(
            400,
            f"task {task_id} is {states[0]}; expected one that has not ended to kill it. Leave it as it is.",
        )
    life.kill(tx, task_id)


@writes
def pause(tx: Transaction, request: ApiRequest) -> None:
    """Stop a task's process; ``unpause`` starts a new process."""
    life.pause(tx, request.path_params["task_id"])


@writes
def unpause(tx: Transaction, request: ApiRequest) -> None:
    life.unpause(tx, request.path_params["task_id"])


_ONE = "/tasks/{task_id}"
routes = [
    route("GET", "/tasks", list_tasks, access=USER),
    route("GET", _ONE, show_task, access=TRIAL),
    route("POST", "/generic-tasks", create, access=USER, max_body_bytes=MAX_BODY_BYTES),
    route("GET", f"{_ONE}/config", show_config, access=USER),
    route("POST", f"{_ONE}/kill", kill, access=USER),
    route("POST", f"{_ONE}/pause", pause, access=USER),
    route("POST", f"{_ONE}/unpause", unpause, access=USER),
]
