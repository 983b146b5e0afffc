"""Generic tasks (``det task``): processes that can be paused and forked."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from determined.common.api import bindings

from dstrial.config.documents import read_yaml_text
from dstrial.config.secrets import unmasked
from dstrial.errors import RequestError
from dstrial.master.api.commands import MAX_BODY_BYTES, checked
from dstrial.master.api.tasks import submitted
from dstrial.master.backends.model_definition import pack
from dstrial.master.http.fields import Fields
from dstrial.master.http.messages import message
from dstrial.master.http.router import USER, ApiRequest, route
from dstrial.master.lifecycle import commands as life
from dstrial.master.store import commands, projects
from dstrial.master.store.commands import NewCommand
from dstrial.master.store.database import Transaction

if TYPE_CHECKING:
    from dstrial.master.services import Services

_KIND = ("GENERIC",)


async def create(request: ApiRequest) -> dict[str, Any]:
    body, services = request.body(), request.services
    forked_from, parent_id = body.text("forkedFrom") or None, body.text("parentId") or None
    for other in (forked_from, parent_id):
        if other is not None:
            await services.read(commands.require, other, _KIND)
    forked = None if forked_from is None else await services.read(commands.require, forked_from, _KIND)
    known = [] if forked is None else [json.loads(forked.config)]
    given = await _given(request, body, forked_from)
    spec = await checked(request, given, "GENERIC", None, *known)
    # The client sends secrets back masked; the fork keeps the original values.
    original = unmasked(given, [*known, spec.config], "the config")
    project = await services.read(projects.require, body.integer("projectId") or projects.DEFAULT_ID)
    projects.refuse_shut(project, "take another task")
    new = NewCommand(
        "GENERIC",
        spec,
        request.user.id,
        project.workspace_id,
        await _context(request, body, forked_from, parent_id),
        is_pausable=not body.flag("noPause"),
        parent_id=parent_id,
        forked_from=forked_from,
        original=original,
    )
    task_id = await services.write(lambda tx: life.create(tx, new))
    return message(bindings.v1CreateGenericTaskResponse, taskId=task_id, warnings=[])


async def _given(request: ApiRequest, body: Fields, forked_from: str | None) -> dict[str, Any]:
    text = body.text("config") or ""
    if not text.strip() and forked_from is not None:
        row = await request.services.read(commands.require, forked_from, _KIND)
        assert row.original_config is not None
        original: dict[str, Any] = json.loads(row.original_config)
        return original
    limits = request.services.settings.limits
    given = (
        await request.services.check(lambda: read_yaml_text(text, "the task's config", limits))
    ).value or {}
    if not isinstance(given, dict):
        raise body.wrong("config", "a mapping in YAML")
    return given


async def _context(
    request: ApiRequest, body: Fields, forked_from: str | None, parent_id: str | None
) -> bytes:
    """Return the files sent, or those of the parent or of the forked task (tar.gz)."""
    services = request.services
    files = [dict(file) for file in body.field_list("contextDirectory") or []]
    if body.flag("inheritContext"):
        if parent_id is None or files:
            raise RequestError(
                400,
                "inheritContext is true; expected a parentId with it, and no files. Pass --parent, and no --context.",
            )
        return await _kept_context(services, parent_id)
    if not files and forked_from is not None:
        return await _kept_context(services, forked_from)
    return await services.run(lambda: pack(files))


async def _kept_context(services: Services, task_id: str) -> bytes:
    """Return another task's files, or raise if they were deleted with its log."""
    tgz = await services.read(commands.context, task_id)
    if tgz is None:
        days = services.settings.log_retention_days
        kept = "" if days is None or days < 0 else f", now {days}"
        raise RequestError(
            400,
            f"the context of task {task_id} is deleted; expected that of a task that ended within "
            f"retention_policy.log_retention_days{kept} (the master's settings). Make the task anew with `det task create`.",
        )
    return tgz


async def show_config(request: ApiRequest) -> dict[str, Any]:
    row = await request.services.read(commands.require, request.path_params["task_id"])
    return message(
        bindings.v1GetGenericTaskConfigResponse, config=submitted(row, request.services.secret_names)
    )


async def kill(request: ApiRequest) -> dict[str, Any]:
    """Kill a task and its descendants, or its whole tree with ``killFromRoot``.

    Source: Determined 0.38.1, KillGenericTask: "cannot cancel task … as it is in state", for COMPLETED and CANCELED.
    """
    task_id, services = request.path_params["task_id"], request.services
    await services.read(commands.require, task_id)
    if request.body().flag("killFromRoot"):
        task_id = await services.read(commands.root, task_id)

    def write(tx: Transaction) -> None:
        states = [commands.require(tx.connection, one).state for one in commands.tree(tx.connection, task_id)]
        if states[0] in ("COMPLETED", "CANCELED") and all(state in commands.ENDED for state in states):
            raise RequestError(
                400,
                f"task {task_id} is {states[0]}; expected one that has not ended to kill it. Leave it as it is.",
            )
        life.kill(tx, task_id)

    await services.write(write)
    return {}


async def pause(request: ApiRequest) -> dict[str, Any]:
    """Stop a task's process; unpausing starts a new one."""
    task_id = request.path_params["task_id"]
    await request.services.write(lambda tx: life.pause(tx, task_id))
    return {}


async def unpause(request: ApiRequest) -> dict[str, Any]:
    task_id = request.path_params["task_id"]
    await request.services.write(lambda tx: life.unpause(tx, task_id))
    return {}


_ONE = "/tasks/{task_id}"
routes = [
    route("POST", "/generic-tasks", create, access=USER, max_body_bytes=MAX_BODY_BYTES),
    route("GET", f"{_ONE}/config", show_config, access=USER),
    route("POST", f"{_ONE}/kill", kill, access=USER),
    route("POST", f"{_ONE}/pause", pause, access=USER),
    route("POST", f"{_ONE}/unpause", unpause, access=USER),
]
