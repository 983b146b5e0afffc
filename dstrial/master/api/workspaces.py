"""Routes for workspaces and templates: list, create, change, archive and delete."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from determined.common.api import bindings

from dstrial.config.documents import check_value
from dstrial.config.experiment_config.storage import checked_storage
from dstrial.config.secrets import unmasked
from dstrial.errors import RequestError
from dstrial.master.http.access import require_owner
from dstrial.master.http.fields import Fields, shown
from dstrial.master.http.responses import message
from dstrial.master.http.router import USER, ApiRequest, reads, route, writes
from dstrial.master.http.serializers import shown_config, stored
from dstrial.master.lifecycle import experiments
from dstrial.master.settings import MasterSettings
from dstrial.master.store import workspaces
from dstrial.master.store.database import Connection, Transaction
from dstrial.master.store.projects import ProjectInfo

WorkspaceOrProject: TypeAlias = "workspaces.WorkspaceInfo | ProjectInfo"

_ORDER: dict[str, Callable[[workspaces.WorkspaceInfo], Any]] = {
    "": lambda row: row.id,
    "SORT_BY_NAME": lambda row: row.name.casefold(),
}
# Fields of a request that the embedded master does not support.
_KUBERNETES_FIELDS = ("clusterNamespaceMeta", "clusterQuotaPairs")
_POOL_FIELDS = (
    "defaultComputePool",
    "defaultAuxPool",
    "defaultComputeResourcePool",
    "defaultAuxResourcePool",
)
_TEMPLATE = "the template's config"  # in messages


def workspace_json(row: workspaces.WorkspaceInfo, settings: MasterSettings) -> dict[str, Any]:
    return message(
        bindings.v1Workspace,
        id=row.id,
        name=row.name,
        archived=bool(row.is_archived),
        immutable=bool(row.is_immutable),
        pinned=False,
        state=f"WORKSPACE_STATE_{row.state}",
        errorMessage=row.error,
        numProjects=row.num_projects,
        numExperiments=row.num_experiments,
        userId=row.owner_id,
        username=row.username,
        agentUserGroup=stored(row.agent_user_group),
        checkpointStorageConfig=shown_config(row.checkpoint_storage, settings.secret_names),
        defaultComputePool=settings.pool_name,
        defaultAuxPool=settings.pool_name,
    )


def is_wanted(request: ApiRequest, row: WorkspaceOrProject) -> bool:
    """Return whether a workspace or project matches the filters in a request's query.

    The filter ``name`` must equal the whole name, ignoring case, because clients take the first result. A project in an
    archived workspace counts as archived.
    """
    exact, name = request.query("nameCaseSensitive"), request.query("name")
    user_ids, usernames = request.query_ints("userIds"), request.queries("users")
    is_archived = row.is_shut if isinstance(row, ProjectInfo) else row.is_archived
    return (
        exact in (None, "", row.name)
        and (not name or name.casefold() == row.name.casefold())
        and request.query_flag("archived") in (None, is_archived)
        and (not user_ids or row.owner_id in user_ids)
        and (not usernames or row.username in usernames)
    )


@reads
def list_workspaces(connection: Connection, request: ApiRequest) -> dict[str, Any]:
    found = [row for row in workspaces.list_workspaces(connection) if is_wanted(request, row)]
    if request.query_flag("pinned"):  # pinning is unsupported, so no workspace is pinned
        found = []
    rows, pagination = request.page(request.ordered(found, _ORDER, bindings.v1GetWorkspacesRequestSortBy))
    shown = [workspace_json(row, request.services.settings) for row in rows]
    return {"workspaces": shown, "pagination": pagination}


def _read_workspace_json(connection: Connection, request: ApiRequest, workspace_id: int) -> dict[str, Any]:
    return workspace_json(workspaces.require(connection, workspace_id), request.services.settings)


@reads
def show_workspace(connection: Connection, request: ApiRequest) -> dict[str, Any]:
    return {"workspace": _read_workspace_json(connection, request, request.path_params["workspace_id"])}


def _storage(body: Fields) -> dict[str, Any] | None:
    given = body.mapping("checkpointStorageConfig")
    return checked_storage(given, "the workspace's storage") if given else None


def _refuse_unsupported(body: Fields, pool_name: str) -> None:
    if any(body.get(name) for name in _KUBERNETES_FIELDS):
        raise RequestError(
            501,
            "namespaces and quotas of Kubernetes are not offered by the embedded master. Leave them out, or use a "
            "Determined cluster.",
        )
    for name in _POOL_FIELDS:
        if body.text(name) not in (None, "", pool_name):
            raise body.wrong(name, f"{pool_name!r}, the only pool")


@writes
def create_workspace(tx: Transaction, request: ApiRequest) -> dict[str, Any]:
    body = request.body()
    _refuse_unsupported(body, request.services.settings.pool_name)
    name, storage, group = body.required_text("name"), _storage(body), body.mapping("agentUserGroup")
    workspace_id = workspaces.create(tx, name, request.user.id, storage, group)
    created = _read_workspace_json(tx.connection, request, workspace_id)
    return message(bindings.v1PostWorkspaceResponse, workspace=created, namespaceBindings={})


def _editable_workspace(connection: Connection, request: ApiRequest, verb: str) -> workspaces.WorkspaceInfo:
    """Return the workspace in the path; raise HTTP 403 if the user may not change it.

    Raises ``InvalidError`` for the default workspace, which never changes; ``verb`` is the rejected change in the message.
    """
    row = workspaces.require(connection, request.path_params["workspace_id"])
    workspaces.refuse_immutable(row, verb)
    require_owner(request.user, row.owner_id, f"workspace {row.name!r}")
    return row


@writes
def patch_workspace(tx: Transaction, request: ApiRequest) -> dict[str, Any]:
    body, row = request.body(), _editable_workspace(tx.connection, request, "be changed")
    _refuse_unsupported(body, request.services.settings.pool_name)
    name = body.text("name")
    fields: dict[str, Any] = {}
    if body.mapping("checkpointStorageConfig") is not None:
        fields["checkpoint_storage"] = _storage(body)
    if body.mapping("agentUserGroup") is not None:
        fields["agent_user_group"] = body.mapping("agentUserGroup")
    workspaces.refuse_archived(row, "be changed")
    if name is not None:
        workspaces.check_name(tx.connection, name, row.id)
        fields["name"] = name
    workspaces.change(tx, row.id, **fields)
    changed = _read_workspace_json(tx.connection, request, row.id)
    return message(bindings.v1PatchWorkspaceResponse, workspace=changed, namespaceBindings={})


@writes
def archive_workspace(tx: Transaction, request: ApiRequest) -> None:
    row = _editable_workspace(tx.connection, request, "be archived")
    workspaces.change(tx, row.id, is_archived=request.route.path.endswith("/archive"))


@writes
def delete_workspace(tx: Transaction, request: ApiRequest) -> dict[str, Any]:
    row = _editable_workspace(tx.connection, request, "be deleted")
    return message(bindings.v1DeleteWorkspaceResponse, completed=experiments.delete_workspace(tx, row.id))


@reads
def list_pools(connection: Connection, request: ApiRequest) -> dict[str, Any]:
    workspaces.require(connection, request.path_params["workspace_id"])
    pools, pagination = request.page([request.services.settings.pool_name])
    return message(bindings.v1ListRPsBoundToWorkspaceResponse, resourcePools=pools, pagination=pagination)


def _template_json(request: ApiRequest, row: workspaces.Template) -> dict[str, Any]:
    return message(
        bindings.v1Template,
        name=row.name,
        config=shown_config(row.config, request.services.secret_names),
        workspaceId=row.workspace_id,
    )


def _template(connection: Connection, request: ApiRequest) -> workspaces.Template:
    return workspaces.require_template(connection, request.path_params["template"])


@reads
def list_templates(connection: Connection, request: ApiRequest) -> dict[str, Any]:
    name, workspace_ids = (request.query("name") or "").casefold(), request.query_ints("workspaceIds")
    request.query_choice("sortBy", bindings.v1GetTemplatesRequestSortBy)
    found = [
        row
        for row in workspaces.list_templates(connection)
        if name in row.name.casefold() and (not workspace_ids or row.workspace_id in workspace_ids)
    ]
    rows, pagination = request.page(found[::-1] if request.is_descending else found)
    templates = [_template_json(request, row) for row in rows]
    return message(bindings.v1GetTemplatesResponse, templates=templates, pagination=pagination)


@reads
def show_template(connection: Connection, request: ApiRequest) -> dict[str, Any]:
    template = _template_json(request, _template(connection, request))
    return message(bindings.v1GetTemplateResponse, template=template)


async def _check_template(request: ApiRequest, config: Mapping[str, Any]) -> None:
    await request.services.check(lambda: check_value(config, _TEMPLATE))


async def create_template(request: ApiRequest) -> dict[str, Any]:
    body, name = request.body(), request.path_params["template"]
    config = body.mapping("config")
    if config is None:
        raise body.wrong("config", "a part of an experiment config")
    await _check_template(request, config)

    def write(tx: Transaction) -> dict[str, Any]:
        row = workspaces.require(tx.connection, body.integer("workspaceId") or workspaces.DEFAULT_ID)
        workspaces.refuse_archived(row, "take another template")
        workspaces.create_template(tx, name, unmasked(config, [], _TEMPLATE), row.id)
        return _template_json(request, _template(tx.connection, request))

    return message(bindings.v1PostTemplateResponse, template=await request.services.write(write))


async def patch_template(request: ApiRequest) -> dict[str, Any]:
    name, config = request.path_params["template"], request.json()
    if not isinstance(config, dict):
        raise RequestError(
            400,
            f"the template's config is {shown(config)}; expected a part of an experiment config. Send a mapping.",
        )
    await _check_template(request, config)

    def write(tx: Transaction) -> dict[str, Any]:
        before = json.loads(_template(tx.connection, request).config)
        workspaces.change_template(tx, name, unmasked(config, [before], _TEMPLATE))
        return _template_json(request, _template(tx.connection, request))

    return message(bindings.v1PatchTemplateConfigResponse, template=await request.services.write(write))


@writes
def delete_template(tx: Transaction, request: ApiRequest) -> None:
    workspaces.delete_template(tx, _template(tx.connection, request).name)


_ONE = "/workspaces/{workspace_id:int}"
_ONE_TEMPLATE = "/templates/{template}"
routes = [
    route("GET", "/workspaces", list_workspaces, access=USER),
    route("POST", "/workspaces", create_workspace, access=USER),
    route("GET", _ONE, show_workspace, access=USER),
    route("PATCH", _ONE, patch_workspace, access=USER),
    route("DELETE", _ONE, delete_workspace, access=USER),
    route("POST", f"{_ONE}/archive", archive_workspace, access=USER),
    route("POST", f"{_ONE}/unarchive", archive_workspace, access=USER),
    route("GET", f"{_ONE}/available-resource-pools", list_pools, access=USER),
    route("GET", "/templates", list_templates, access=USER),
    route("GET", _ONE_TEMPLATE, show_template, access=USER),
    route("POST", _ONE_TEMPLATE, create_template, access=USER),
    route("PATCH", _ONE_TEMPLATE, patch_template, access=USER),
    route("DELETE", _ONE_TEMPLATE, delete_template, access=USER),
]
