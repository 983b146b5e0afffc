"""``det tensorboard``: a process behind the proxy that reads trials' event files."""

from __future__ import annotations

import json
from typing import Any

from determined.common.api import bindings

from dstrial.config.secrets import masked
from dstrial.master.api.commands import checked, common_fields, routes_of, workspace_of
from dstrial.master.backends.model_definition import pack
from dstrial.master.http.fields import Fields
from dstrial.master.http.messages import message
from dstrial.master.http.router import ApiRequest
from dstrial.master.http.serializers import as_data
from dstrial.master.lifecycle import commands as life
from dstrial.master.lifecycle import tensorboards
from dstrial.master.store import commands
from dstrial.master.store.commands import NewCommand


def _json(request: ApiRequest, row: commands.CommandInfo) -> dict[str, Any]:
    return message(
        bindings.v1Tensorboard,
        **common_fields(request, row),
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
    body, services = request.body(), request.services
    if body.get("filters"):
        raise body.wrong("filters", "experimentIds or trialIds")
    experiment_ids, trial_ids = _ids(body, "experimentIds"), _ids(body, "trialIds")
    await services.read(tensorboards.sources, services.cluster_id, experiment_ids, trial_ids)
    given = body.mapping("config") or {}
    spec = await checked(request, given, "TENSORBOARD", body.text("templateName"))
    files = [dict(file) for file in body.field_list("files") or []]
    tgz = await services.run(lambda: pack(files))
    workspace_id = await workspace_of(request, body.integer("workspaceId"))
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
        config=as_data(masked(spec.config, services.secret_names)),
        warnings=[],
    )


routes = routes_of("TENSORBOARD", "tensorboard", launch, _json, bindings.v1GetTensorboardsRequestSortBy)
