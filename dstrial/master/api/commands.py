"""``det command``, ``det tensorboard``, and code shared with generic tasks.

A command is a process on this machine with a log, an exit code and, if requested, slots.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Mapping
from typing import Any

from determined.common.api import bindings

from dstrial.config.diagnostics import Diagnostics
from dstrial.config.documents import check_value
from dstrial.config.experiment_config.command import NAMES, CommandConfig, CommandKind, check_command
from dstrial.config.secrets import masked, unmasked
from dstrial.context_directory import MAX_BYTES
from dstrial.errors import RequestError
from dstrial.master.api.engine_refusals import refuse_unsatisfiable
from dstrial.master.backends.model_definition import pack
from dstrial.master.clock import format_us, now_us
from dstrial.master.http.fields import Fields
from dstrial.master.http.messages import message, page_of
from dstrial.master.http.router import USER, ApiRequest, Handler, Route, route
from dstrial.master.http.serializers import as_data, shown_config
from dstrial.master.lifecycle import commands as life
from dstrial.master.lifecycle import tensorboards
from dstrial.master.scheduler.resource_requests import request_of_command
from dstrial.master.store import commands, projects, workspaces
from dstrial.master.store.commands import NewCommand

MAX_BODY_BYTES = MAX_BYTES * 3 // 2  # of a request with files

_SORTS: Mapping[str, Callable[[commands.CommandInfo], Any]] = {
    "SORT_BY_ID": lambda row: row.task_id,
    "SORT_BY_DESCRIPTION": lambda row: row.description,
    "SORT_BY_START_TIME": lambda row: row.start_us,
    "SORT_BY_WORKSPACE_ID": lambda row: row.workspace_id,
}


async def checked(
    request: ApiRequest, given: Mapping[str, Any], kind: CommandKind, template_name: str | None, *others: Any
) -> CommandConfig:
    """Validate a command's config, merged over its template and the master's defaults.

    ``given`` may be copied from the template or from ``others``; masked secrets in it are restored from there.

    Raises:
        RequestError: 404, the template does not exist.
        ConfigError: lists all problems of the config, or why the engine could never start the command.
    """
    services = request.services
    template: dict[str, Any] | None = None
    if template_name:
        template = json.loads((await services.read(workspaces.require_template, template_name)).config)

    def check() -> CommandConfig:
        check_value(given, "the command's config", services.settings.limits)
        return check_command(
            unmasked(given, [template or {}, *others], "the config"),
            kind,
            num_slots=max((len(node.slots) for node in services.backend.nodes()), default=0),
            environment_variables=services.settings.environment_variables,
            template=template,
            launch_error=services.settings.launch_error,
        )

    spec = await services.check(check)
    await refuse_unsatisfiable(
        services,
        request_of_command(spec.config),
        Diagnostics({}, f"{NAMES[kind]} config"),
        slots_key="resources.slots",
    )
    return spec


async def workspace_of(request: ApiRequest, workspace_id: int | None) -> int:
    """Return a command's workspace id (default: the first); reject archived ones."""
    row = await request.services.read(workspaces.require, workspace_id or projects.DEFAULT_ID)
    if row.is_archived:
        raise RequestError(
            400,
            f"workspace {row.name!r} is archived; expected one that is not. Take it back with "
            "`det workspace unarchive`, or name another.",
        )
    return int(row.id)


def task_state(row: commands.CommandInfo) -> str:
    if row.state in commands.ENDED:
        return "STATE_TERMINATED"
    if row.state.startswith("STOPPING"):
        return "STATE_TERMINATING"
    if row.allocation_id is None:
        return "STATE_QUEUED"
    return "STATE_RUNNING" if row.allocation_state == "RUNNING" else "STATE_STARTING"


def common_fields(request: ApiRequest, row: commands.CommandInfo) -> dict[str, Any]:
    return {
        "id": row.task_id,
        "jobId": row.job_id,
        "description": row.description,
        "displayName": row.display_name or row.username,
        "username": row.username,
        "userId": row.owner_id,
        "workspaceId": row.workspace_id,
        "resourcePool": request.services.settings.pool_name,
        "startTime": format_us(row.start_us),
        "state": task_state(row),
        "exitStatus": row.exit_status or "",
    }


async def _page(
    request: ApiRequest, kind: CommandKind, sorts: type[enum.Enum]
) -> tuple[list[commands.CommandInfo], dict[str, int]]:
    users, user_ids = request.queries("users"), request.query_ints("userIds")
    workspace_id = request.query_int("workspaceId") or None
    sort = request.query_choice("sortBy", sorts) or "SORT_BY_START_TIME"
    is_descending = request.query_choice("orderBy", bindings.v1OrderBy) == "ORDER_BY_DESC"
    rows = [
        row
        for row in await request.services.read(commands.listing, kind, now_us())
        if (not users or row.username in users)
        and (not user_ids or row.owner_id in user_ids)
        and workspace_id in (None, row.workspace_id)
    ]
    rows.sort(key=_SORTS.get(sort, _SORTS["SORT_BY_START_TIME"]), reverse=is_descending)
    part = page_of(len(rows), request.query_int("offset"), request.query_int("limit"))
    return rows[part.start : part.end], part.to_json()


def routes_of(
    kind: CommandKind,
    noun: str,
    launch: Handler,
    to_json: Callable[[ApiRequest, commands.CommandInfo], dict[str, Any]],
    sorts: type[enum.Enum],
) -> list[Route]:
    """Return the routes to start, list, show, kill and prioritise one kind of command."""

    async def one_of(request: ApiRequest) -> commands.CommandInfo:
        return await request.services.read(commands.require, request.path_params["task_id"], (kind,))

    async def list_all(request: ApiRequest) -> dict[str, Any]:
        """List commands that are active or ended within the last day."""
        rows, pagination = await _page(request, kind, sorts)
        return {f"{noun}s": [to_json(request, row) for row in rows], "pagination": pagination}

    async def show(request: ApiRequest) -> dict[str, Any]:
        row = await one_of(request)
        return {
            noun: to_json(request, row),
            "config": shown_config(row.config, request.services.secret_names),
        }

    async def kill(request: ApiRequest) -> dict[str, Any]:
        row = await one_of(request)
        await request.services.write(lambda tx: life.kill(tx, row.task_id))
        return {noun: to_json(request, await one_of(request))}

    async def set_priority(request: ApiRequest) -> dict[str, Any]:
        priority = request.body().required_integer("priority", 1, 99)
        row = await one_of(request)
        await request.services.write(lambda tx: life.set_priority(tx, row.task_id, priority))
        return {noun: to_json(request, await one_of(request))}

    one = f"/{noun}s/{{task_id}}"
    return [
        route("POST", f"/{noun}s", launch, access=USER, max_body_bytes=MAX_BODY_BYTES),
        route("GET", f"/{noun}s", list_all, access=USER),
        route("GET", one, show, access=USER),
        route("POST", f"{one}/kill", kill, access=USER),
        route("POST", f"{one}/set_priority", set_priority, access=USER),
    ]


def _command_json(request: ApiRequest, row: commands.CommandInfo) -> dict[str, Any]:
    return message(bindings.v1Command, **common_fields(request, row))


def _tensorboard_json(request: ApiRequest, row: commands.CommandInfo) -> dict[str, Any]:
    return message(
        bindings.v1Tensorboard,
        **common_fields(request, row),
        experimentIds=json.loads(row.experiment_ids),
        trialIds=json.loads(row.trial_ids),
        serviceAddress=f"/proxy/{row.task_id}/",
    )


async def _launch_command(
    request: ApiRequest, kind: CommandKind, experiment_ids: list[int], trial_ids: list[int]
) -> tuple[commands.CommandInfo, dict[str, Any]]:
    """Store and enqueue a command; return its row and its config without secrets."""
    body, services = request.body(), request.services
    spec = await checked(request, body.mapping("config") or {}, kind, body.text("templateName"))
    files = [dict(file) for file in body.field_list("files") or []]
    tgz = await services.run(lambda: pack(files))
    workspace_id = await workspace_of(request, body.integer("workspaceId"))
    new = NewCommand(
        kind,
        spec,
        request.user.id,
        workspace_id,
        tgz,
        experiment_ids=experiment_ids,
        trial_ids=trial_ids,
    )
    task_id = await services.write(lambda tx: life.create(tx, new))
    row = await services.read(commands.require, task_id)
    return row, {"config": as_data(masked(spec.config, services.secret_names)), "warnings": []}


async def launch_command(request: ApiRequest) -> dict[str, Any]:
    row, more = await _launch_command(request, "COMMAND", [], [])
    return message(bindings.v1LaunchCommandResponse, command=_command_json(request, row), **more)


def _ids(body: Fields, name: str) -> list[int]:
    values = body.items_of(name) or []
    if any(isinstance(value, bool) or not isinstance(value, int) for value in values):
        raise body.wrong(name, "a list of whole numbers")
    return list(dict.fromkeys(values))


async def launch_tensorboard(request: ApiRequest) -> dict[str, Any]:
    body, services = request.body(), request.services
    if body.get("filters"):
        raise body.wrong("filters", "experimentIds or trialIds")
    experiment_ids, trial_ids = _ids(body, "experimentIds"), _ids(body, "trialIds")
    await services.read(tensorboards.sources, services.cluster_id, experiment_ids, trial_ids)
    row, more = await _launch_command(request, "TENSORBOARD", experiment_ids, trial_ids)
    return message(bindings.v1LaunchTensorboardResponse, tensorboard=_tensorboard_json(request, row), **more)


# Notebooks and shells are unsupported: their lists are empty, ``http.unsupported`` rejects other requests.


async def list_notebooks(request: ApiRequest) -> dict[str, Any]:
    return {"notebooks": [], "pagination": _empty_list(request)}


async def list_shells(request: ApiRequest) -> dict[str, Any]:
    return {"shells": [], "pagination": _empty_list(request)}


def _empty_list(request: ApiRequest) -> dict[str, int]:
    return page_of(0, request.query_int("offset"), request.query_int("limit")).to_json()


routes = [
    route("GET", "/notebooks", list_notebooks, access=USER),
    route("GET", "/shells", list_shells, access=USER),
    *routes_of("COMMAND", "command", launch_command, _command_json, bindings.v1GetCommandsRequestSortBy),
    *routes_of(
        "TENSORBOARD",
        "tensorboard",
        launch_tensorboard,
        _tensorboard_json,
        bindings.v1GetTensorboardsRequestSortBy,
    ),
]
