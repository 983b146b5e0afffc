"""Templates: list, create, change and delete."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from determined.common.api import bindings

from dstrial.config.documents import check_value
from dstrial.config.secrets import SecretNames, unmasked
from dstrial.errors import RequestError
from dstrial.master.http.fields import Fields, shown
from dstrial.master.http.messages import message, page_of
from dstrial.master.http.router import USER, ApiRequest, route
from dstrial.master.http.serializers import shown_config
from dstrial.master.store import workspaces
from dstrial.master.store.database import Transaction

_WHERE = "the template's config"


def template_json(row: workspaces.Template, names: SecretNames) -> dict[str, Any]:
    return message(
        bindings.v1Template,
        name=row.name,
        config=shown_config(row.config, names),
        workspaceId=row.workspace_id,
    )


async def _config(request: ApiRequest, body: Fields) -> dict[str, Any]:
    config = body.mapping("config")
    if config is None:
        raise body.wrong("config", "a part of an experiment config")
    await _check(request, config)
    return config


async def _check(request: ApiRequest, config: Mapping[str, Any]) -> None:
    limits = request.services.settings.limits
    await request.services.check(lambda: check_value(config, "the template's config", limits))


def _workspace_id(tx: Transaction, body: Fields) -> int:
    row = workspaces.require(tx.connection, body.integer("workspaceId") or workspaces.DEFAULT_ID)
    workspaces.refuse_archived(row, "take another template")
    return int(row.id)


async def list_templates(request: ApiRequest) -> dict[str, Any]:
    name, workspace_ids = (request.query("name") or "").casefold(), request.query_ints("workspaceIds")
    request.query_choice("sortBy", bindings.v1GetTemplatesRequestSortBy)
    rows = [
        row
        for row in await request.services.read(workspaces.list_templates)
        if name in row.name.casefold() and (not workspace_ids or row.workspace_id in workspace_ids)
    ]
    if request.query_choice("orderBy", bindings.v1OrderBy) == "ORDER_BY_DESC":
        rows.reverse()
    page = page_of(len(rows), request.query_int("offset"), request.query_int("limit"))
    return message(
        bindings.v1GetTemplatesResponse,
        templates=[template_json(row, request.services.secret_names) for row in rows[page.start : page.end]],
        pagination=page.to_json(),
    )


async def _shown(request: ApiRequest, name: str) -> dict[str, Any]:
    row = await request.services.read(workspaces.require_template, name)
    return template_json(row, request.services.secret_names)


async def show_template(request: ApiRequest) -> dict[str, Any]:
    return message(
        bindings.v1GetTemplateResponse, template=await _shown(request, request.path_params["template"])
    )


async def create_template(request: ApiRequest) -> dict[str, Any]:
    body, name = request.body(), request.path_params["template"]
    config = unmasked(await _config(request, body), [], _WHERE)
    await request.services.write(
        lambda tx: workspaces.create_template(tx, name, config, _workspace_id(tx, body))
    )
    return message(bindings.v1PostTemplateResponse, template=await _shown(request, name))


async def patch_config(request: ApiRequest) -> dict[str, Any]:
    name, config = request.path_params["template"], request.json()
    if not isinstance(config, dict):
        raise RequestError(
            400,
            f"the template's config is {shown(config)}; expected a part of an experiment config. Send a mapping.",
        )
    await _check(request, config)

    def write(tx: Transaction) -> None:
        row = workspaces.require_template(tx.connection, name)
        workspaces.change_template(tx, name, unmasked(config, [json.loads(row.config)], _WHERE))

    await request.services.write(write)
    return message(bindings.v1PatchTemplateConfigResponse, template=await _shown(request, name))


async def delete_template(request: ApiRequest) -> dict[str, Any]:
    name = request.path_params["template"]

    def write(tx: Transaction) -> None:
        workspaces.require_template(tx.connection, name)
        workspaces.delete_template(tx, name)

    await request.services.write(write)
    return {}


_ONE = "/templates/{template}"
routes = [
    route("GET", "/templates", list_templates, access=USER),
    route("GET", _ONE, show_template, access=USER),
    route("POST", _ONE, create_template, access=USER),
    route("PATCH", _ONE, patch_config, access=USER),
    route("DELETE", _ONE, delete_template, access=USER),
]
