"""Configs, lists and states shared by commands, TensorBoards and generic tasks."""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Mapping
from typing import Any

from determined.common.api import bindings

from dstrial.config.experiment_config.command import CommandConfig, CommandKind, check_command
from dstrial.config.parsing.limits import check_value
from dstrial.config.secrets import unmasked
from dstrial.errors import RequestError
from dstrial.master.clock import format_us, now_us
from dstrial.master.http.messages import page_of
from dstrial.master.http.router import ApiRequest
from dstrial.master.http.serializers import as_data as as_data
from dstrial.master.http.serializers import shown_config
from dstrial.master.lifecycle import commands as life
from dstrial.master.store import commands, projects, workspaces

_SORTS: Mapping[str, Callable[[commands.CommandInfo], Any]] = {
    "SORT_BY_ID": lambda row: row.task_id,
    "SORT_BY_DESCRIPTION": lambda row: row.description,
    "SORT_BY_START_TIME": lambda row: row.start_us,
    "SORT_BY_WORKSPACE_ID": lambda row: row.workspace_id,
}


async def checked(
    request: ApiRequest, given: Mapping[str, Any], kind: CommandKind, template_name: str | None, *others: Any
) -> CommandConfig:
    """Check the config of a command with its template and this master's own defaults.

    Args:
        request: whose user asks.
        given: the config; where it has the mask of a secret, what is behind it comes from the template or ``others``.
        kind: of command.
        template_name: a template's name; None for none.
        others: configs that it may be a copy of.

    Raises:
        RequestError: 404, there is no such template.
        ConfigError: with all problems of the config.
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
            num_slots=len(services.slots),
            environment_variables=services.settings.environment_variables,
            template=template,
        )

    return await services.check(check)


async def one_of(request: ApiRequest, kind: CommandKind) -> commands.CommandInfo:
    """Return the command of this kind that the path names.

    Raises:
        RequestError: 404, there is none.
    """
    return await request.services.read(commands.require, request.path_params["task_id"], (kind,))


async def killed(request: ApiRequest, kind: CommandKind) -> commands.CommandInfo:
    """Kill the command that the path names, unless it has ended, and return it."""
    row = await one_of(request, kind)
    await request.services.write(lambda tx: life.kill(tx, row.task_id))
    return await one_of(request, kind)


async def prioritised(request: ApiRequest, kind: CommandKind) -> commands.CommandInfo:
    """Give the path's command the body's priority, 1 to 99, and return it."""
    priority = request.body().required_integer("priority", 1, 99)
    row = await one_of(request, kind)
    await request.services.write(lambda tx: life.set_priority(tx, row.task_id, priority))
    return await one_of(request, kind)


def config_of(request: ApiRequest, row: commands.CommandInfo) -> Any:
    """Return the config of a command as it is shown."""
    return shown_config(row.config, request.services.secret_names)


async def workspace_of(request: ApiRequest, workspace_id: int | None) -> int:
    """Return the workspace that a command goes into; the first one if none is named.

    Raises:
        RequestError: 404, there is no such workspace; 400, it is archived.
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
    """Return the state of a command as ``det`` lists it."""
    if row.state in commands.ENDED:
        return "STATE_TERMINATED"
    if row.state.startswith("STOPPING"):
        return "STATE_TERMINATING"
    if row.allocation_id is None:
        return "STATE_QUEUED"
    return "STATE_RUNNING" if row.allocation_state == "RUNNING" else "STATE_STARTING"


def common_fields(request: ApiRequest, row: commands.CommandInfo) -> dict[str, Any]:
    """Return the fields that ``v1Command`` and ``v1Tensorboard`` have alike."""
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


async def page(
    request: ApiRequest, kind: CommandKind, sorts: type[enum.Enum]
) -> tuple[list[commands.CommandInfo], dict[str, int]]:
    """Return the commands of a kind that a list asks for, and its pagination."""
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
