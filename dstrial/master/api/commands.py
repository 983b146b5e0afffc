"""Routes of ``det command`` and ``det tensorboard``.

The module ``tasks`` uses functions of this module for generic tasks (``det task create``).
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
from dstrial.master.backends.model_definition import pack
from dstrial.master.clock import format_us, now_us
from dstrial.master.http.responses import message
from dstrial.master.http.router import USER, ApiRequest, Handler, Route, reads, route, writes
from dstrial.master.http.serializers import as_data, shown_config
from dstrial.master.lifecycle import commands as life
from dstrial.master.scheduler.resource_requests import refuse_unsatisfiable, request_of_command
from dstrial.master.store import commands, projects, workspaces
from dstrial.master.store.commands import NewCommand
from dstrial.master.store.database import Connection, Transaction

MAX_BODY_BYTES = MAX_BYTES * 3 // 2  # limit of a request with files: base64 takes a third more than the files

_ORDER: Mapping[str, Callable[[commands.CommandInfo], Any]] = {
    "": lambda row: row.start_us,
    "SORT_BY_ID": lambda row: row.task_id,
    "SORT_BY_DESCRIPTION": lambda row: row.description,
    "SORT_BY_WORKSPACE_ID": lambda row: row.workspace_id,
}


async def validated_command(
    request: ApiRequest, given: Mapping[str, Any], kind: CommandKind, template_name: str | None, *others: Any
) -> CommandConfig:
    """Validate a command's config, merged over its template and the master's defaults.

    A user may submit a config that the master has shown with masked secrets. Each mask in ``given`` is replaced by the secret
    from the template or from one of ``others``, the configs that the user may have copied.

    Raises:
        RequestError: 404, the template does not exist.
        ConfigError: lists all problems of the config, or why Slurm or Ray could never start the command.
    """
    services = request.services
    template: dict[str, Any] | None = None
    if template_name:
        template = json.loads((await services.read(workspaces.require_template, template_name)).config)

    def check() -> CommandConfig:
        check_value(given, "the command's config")
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
    """Return the id of the workspace for a new command.

    If ``workspace_id`` is None or 0, the default workspace, 1, is used. Raises HTTP 400 if the workspace is archived.
    """
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


def routes_of(
    kind: CommandKind,
    noun: str,
    launch: Handler,
    to_json: Callable[[ApiRequest, commands.CommandInfo], dict[str, Any]],
    sorts: type[enum.Enum],
) -> list[Route]:
    """Return the routes that start, list, show, kill and prioritise a kind of command.

    ``noun`` names the kind in paths and JSON, for example "command". ``launch`` handles the start request. ``to_json`` converts
    a row for the response. ``sorts`` has the allowed sort orders.
    """

    def to_answer(connection: Connection, request: ApiRequest) -> tuple[commands.CommandInfo, dict[str, Any]]:
        row = commands.require(connection, request.path_params["task_id"], (kind,))
        return row, {noun: to_json(request, row)}

    @reads
    def list_all(connection: Connection, request: ApiRequest) -> dict[str, Any]:
        """Return a page of commands that have not ended, or ended within the last day."""
        users, user_ids = request.queries("users"), request.query_ints("userIds")
        workspace_id = request.query_int("workspaceId") or None
        found = (
            row
            for row in commands.listing(connection, kind, now_us())
            if (not users or row.username in users)
            and (not user_ids or row.owner_id in user_ids)
            and workspace_id in (None, row.workspace_id)
        )
        rows, pagination = request.page(request.ordered(found, _ORDER, sorts))
        return {f"{noun}s": [to_json(request, row) for row in rows], "pagination": pagination}

    @reads
    def show(connection: Connection, request: ApiRequest) -> dict[str, Any]:
        row, answer = to_answer(connection, request)
        return {**answer, "config": shown_config(row.config, request.services.secret_names)}

    @writes
    def kill(tx: Transaction, request: ApiRequest) -> dict[str, Any]:
        row, _ = to_answer(tx.connection, request)
        life.kill(tx, row.task_id)
        return to_answer(tx.connection, request)[1]

    @writes
    def set_priority(tx: Transaction, request: ApiRequest) -> dict[str, Any]:
        row, _ = to_answer(tx.connection, request)
        life.set_priority(tx, row.task_id, request.body().required_integer("priority", 1, 99))
        return to_answer(tx.connection, request)[1]

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
    """Create a command; return its row, and the response's "config" and "warnings"."""
    body, services = request.body(), request.services
    spec = await validated_command(request, body.mapping("config") or {}, kind, body.text("templateName"))
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


async def launch_tensorboard(request: ApiRequest) -> dict[str, Any]:
    body, services = request.body(), request.services
    if body.get("filters"):
        raise body.wrong("filters", "experimentIds or trialIds")
    experiment_ids, trial_ids = (
        list(dict.fromkeys(body.ids("experimentIds"))),
        list(dict.fromkeys(body.ids("trialIds"))),
    )
    await services.read(life.tensorboard_sources, services.cluster_id, experiment_ids, trial_ids)
    row, more = await _launch_command(request, "TENSORBOARD", experiment_ids, trial_ids)
    return message(bindings.v1LaunchTensorboardResponse, tensorboard=_tensorboard_json(request, row), **more)


# Notebooks and shells are unsupported: their lists are empty, the router rejects other requests.


async def list_notebooks(request: ApiRequest) -> dict[str, Any]:
    return {"notebooks": [], "pagination": request.page_of(0).to_json()}


async def list_shells(request: ApiRequest) -> dict[str, Any]:
    return {"shells": [], "pagination": request.page_of(0).to_json()}


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
