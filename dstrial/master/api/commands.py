"""``det command``: processes of this machine with a log, an exit code and slots."""

from __future__ import annotations

from typing import Any

from determined.common.api import bindings

from dstrial.config.secrets import masked
from dstrial.master.api import command_serializers as shapes
from dstrial.master.backends.model_definition import MAX_BYTES, pack
from dstrial.master.http.messages import message, page_of
from dstrial.master.http.router import USER, ApiRequest, route
from dstrial.master.lifecycle import commands as life
from dstrial.master.store import commands
from dstrial.master.store.commands import NewCommand

MAX_BODY_BYTES = MAX_BYTES * 3 // 2
"""Largest body of a request that sends files along."""


def _json(request: ApiRequest, row: commands.CommandInfo) -> dict[str, Any]:
    return message(bindings.v1Command, **shapes.common_fields(request, row))


async def launch(request: ApiRequest) -> dict[str, Any]:
    """``POST commands``: start a command as soon as there are slots for it."""
    body, services = request.body(), request.services
    spec = await shapes.checked(request, body.mapping("config") or {}, "COMMAND", body.text("templateName"))
    files = [dict(file) for file in body.field_list("files") or []]
    tgz = await services.run(lambda: pack(files))
    workspace_id = await shapes.workspace_of(request, body.integer("workspaceId"))
    new = NewCommand("COMMAND", spec, request.user.id, workspace_id, tgz)
    task_id = await services.write(lambda tx: life.create(tx, new))
    row = await services.read(commands.require, task_id)
    return message(
        bindings.v1LaunchCommandResponse,
        command=_json(request, row),
        config=shapes.as_data(masked(spec.config, services.secret_names)),
        warnings=[],
    )


async def list_commands(request: ApiRequest) -> dict[str, Any]:
    """``GET commands``: those that have not ended, or have within a day."""
    rows, pagination = await shapes.page(request, "COMMAND", bindings.v1GetCommandsRequestSortBy)
    return {"commands": [_json(request, row) for row in rows], "pagination": pagination}


async def show(request: ApiRequest) -> dict[str, Any]:
    """``GET commands/{id}``."""
    row = await shapes.one_of(request, "COMMAND")
    return {"command": _json(request, row), "config": shapes.config_of(request, row)}


async def kill(request: ApiRequest) -> dict[str, Any]:
    """``POST commands/{id}/kill``."""
    return {"command": _json(request, await shapes.killed(request, "COMMAND"))}


async def set_priority(request: ApiRequest) -> dict[str, Any]:
    """``POST commands/{id}/set_priority``."""
    return {"command": _json(request, await shapes.prioritised(request, "COMMAND"))}


# There are no notebooks and shells: their lists are empty, and ``not_offered`` refuses the rest.


async def list_notebooks(request: ApiRequest) -> dict[str, Any]:
    """``GET notebooks``."""
    return {"notebooks": [], "pagination": _none(request)}


async def list_shells(request: ApiRequest) -> dict[str, Any]:
    """``GET shells``."""
    return {"shells": [], "pagination": _none(request)}


def _none(request: ApiRequest) -> dict[str, int]:
    return page_of(0, request.query_int("offset"), request.query_int("limit")).to_json()


_ONE = "/commands/{task_id}"
routes = [
    route("GET", "/notebooks", list_notebooks, access=USER),
    route("GET", "/shells", list_shells, access=USER),
    route("POST", "/commands", launch, access=USER, max_body_bytes=MAX_BODY_BYTES),
    route("GET", "/commands", list_commands, access=USER),
    route("GET", _ONE, show, access=USER),
    route("POST", f"{_ONE}/kill", kill, access=USER),
    route("POST", f"{_ONE}/set_priority", set_priority, access=USER),
]
