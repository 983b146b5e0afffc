"""``det tensorboard``: a process behind the proxy that reads trials' event files."""

from __future__ import annotations

import json
from typing import Any

from determined.common.api import bindings

from dstrial.config.secrets import masked
from dstrial.master.api import command_serializers as shapes
from dstrial.master.api.commands import MAX_BODY_BYTES
from dstrial.master.backends.model_definition import pack
from dstrial.master.http.fields import Fields
from dstrial.master.http.messages import message
from dstrial.master.http.router import USER, ApiRequest, route
from dstrial.master.lifecycle import commands as life
from dstrial.master.lifecycle import tensorboards
from dstrial.master.store import commands
from dstrial.master.store.commands import NewCommand


def _json(request: ApiRequest, row: commands.CommandInfo) -> dict[str, Any]:
    return message(
        bindings.v1Tensorboard,
        **shapes.common_fields(request, row),
        experimentIds=json.loads(row.experiment_ids),
        trialIds=json.loads(row.trial_ids),
        serviceAddress=f"/proxy/{row.task_id}/",
    )


def _ids(body: Fields, name: str) -> list[int]:
    values = body.items_of(name) or []
    if any(isinstance(value, bool) or not isinstance(value, int) for value in values):
        raise body.wrong(name, "a list of whole numbers")
    return list(dict.fromkeys(values))


async def launch(request: ApiRequest) -> dict[str, Any]:
    """``POST tensorboards``: start one for experiments, trials, or both."""
    body, services = request.body(), request.services
    if body.get("filters"):
        raise body.wrong("filters", "experimentIds or trialIds")
    experiment_ids, trial_ids = _ids(body, "experimentIds"), _ids(body, "trialIds")
    await services.read(tensorboards.sources, services.cluster_id, experiment_ids, trial_ids)
    given = body.mapping("config") or {}
    spec = await shapes.checked(request, given, "TENSORBOARD", body.text("templateName"))
    files = [dict(file) for file in body.field_list("files") or []]
    tgz = await services.run(lambda: pack(files))
    workspace_id = await shapes.workspace_of(request, body.integer("workspaceId"))
    new = NewCommand(
        "TENSORBOARD",
        spec,
        request.user.id,
        workspace_id,
        tgz,
        experiment_ids=experiment_ids,
        trial_ids=trial_ids,
    )
    task_id = await services.write(lambda tx: life.create(tx, new))
    row = await services.read(commands.require, task_id)
    return message(
        bindings.v1LaunchTensorboardResponse,
        tensorboard=_json(request, row),
        config=shapes.as_data(masked(spec.config, services.secret_names)),
        warnings=[],
    )


async def list_tensorboards(request: ApiRequest) -> dict[str, Any]:
    """``GET tensorboards``: those that have not ended, or have within a day."""
    rows, pagination = await shapes.page(request, "TENSORBOARD", bindings.v1GetTensorboardsRequestSortBy)
    return {"tensorboards": [_json(request, row) for row in rows], "pagination": pagination}


async def show(request: ApiRequest) -> dict[str, Any]:
    """``GET tensorboards/{id}``."""
    row = await shapes.one_of(request, "TENSORBOARD")
    return {"tensorboard": _json(request, row), "config": shapes.config_of(request, row)}


async def kill(request: ApiRequest) -> dict[str, Any]:
    """``POST tensorboards/{id}/kill``."""
    return {"tensorboard": _json(request, await shapes.killed(request, "TENSORBOARD"))}


async def set_priority(request: ApiRequest) -> dict[str, Any]:
    """``POST tensorboards/{id}/set_priority``."""
    return {"tensorboard": _json(request, await shapes.prioritised(request, "TENSORBOARD"))}


_ONE = "/tensorboards/{task_id}"
routes = [
    route("POST", "/tensorboards", launch, access=USER, max_body_bytes=MAX_BODY_BYTES),
    route("GET", "/tensorboards", list_tensorboards, access=USER),
    route("GET", _ONE, show, access=USER),
    route("POST", f"{_ONE}/kill", kill, access=USER),
    route("POST", f"{_ONE}/set_priority", set_priority, access=USER),
]
