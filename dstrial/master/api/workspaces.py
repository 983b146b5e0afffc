"""Workspaces: list, create, change, archive and delete."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

from determined.common.api import bindings

from dstrial.config.experiment_config.storage import checked_storage
from dstrial.errors import RequestError
from dstrial.master.http.access import require_owner
from dstrial.master.http.fields import Fields
from dstrial.master.http.messages import message, page_of
from dstrial.master.http.router import USER, ApiRequest, route
from dstrial.master.http.serializers import shown_config, stored
from dstrial.master.lifecycle import containers
from dstrial.master.settings import MasterSettings
from dstrial.master.store import workspaces
from dstrial.master.store.database import Connection, Transaction
from dstrial.master.store.projects import ProjectInfo

Held: TypeAlias = "workspaces.WorkspaceInfo | ProjectInfo"
HeldT = TypeVar("HeldT", workspaces.WorkspaceInfo, ProjectInfo)

_ORDER: dict[str, Callable[[workspaces.WorkspaceInfo], Any]] = {
    "SORT_BY_NAME": lambda row: row.name.casefold()
}
_KUBERNETES = ("clusterNamespaceMeta", "clusterQuotaPairs")
_POOLS = (
    "defaultComputePool",
    "defaultAuxPool",
    "defaultComputeResourcePool",
    "defaultAuxResourcePool",
)


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


def named(request: ApiRequest) -> Callable[[Held], bool]:
    """Return a predicate: does a workspace or project match the query's filters?

    ``name`` must match entirely, ignoring case, as clients use the first result. A project in an archived workspace counts as
    archived.
    """
    exact, name = request.query("nameCaseSensitive"), request.query("name")
    user_ids, usernames = request.query_ints("userIds"), request.queries("users")
    archived = request.query_flag("archived")

    def is_wanted(row: Held) -> bool:
        return (
            exact in (None, "", row.name)
            and (not name or name.casefold() == row.name.casefold())
            and archived in (None, row.is_shut if isinstance(row, ProjectInfo) else row.is_archived)
            and (not user_ids or row.owner_id in user_ids)
            and (not usernames or row.username in usernames)
        )

    return is_wanted


def ordered(
    rows: list[HeldT], keys: dict[str, Callable[[HeldT], Any]], sort_by: str | None, order: str | None
) -> list[HeldT]:
    is_descending = order == "ORDER_BY_DESC"
    return sorted(rows, key=keys.get(sort_by or "", lambda row: row.id), reverse=is_descending)


async def list_workspaces(request: ApiRequest) -> dict[str, Any]:
    is_wanted = named(request)
    sort_by = request.query_choice("sortBy", bindings.v1GetWorkspacesRequestSortBy)
    order = request.query_choice("orderBy", bindings.v1OrderBy)
    rows = await request.services.read(workspaces.list_workspaces)
    # Pinning is unsupported, so no workspace is pinned.
    found = [] if request.query_flag("pinned") else [row for row in rows if is_wanted(row)]
    found = ordered(found, _ORDER, sort_by, order)
    page = page_of(len(found), request.query_int("offset"), request.query_int("limit"))
    return {
        "workspaces": [
            workspace_json(row, request.services.settings) for row in found[page.start : page.end]
        ],
        "pagination": page.to_json(),
    }


async def _shown(request: ApiRequest, workspace_id: int) -> dict[str, Any]:
    row = await request.services.read(workspaces.require, workspace_id)
    return workspace_json(row, request.services.settings)


async def show_workspace(request: ApiRequest) -> dict[str, Any]:
    return {"workspace": await _shown(request, request.path_params["workspace_id"])}


def _storage(body: Fields) -> dict[str, Any] | None:
    given = body.mapping("checkpointStorageConfig")
    return checked_storage(given, "the workspace's storage") if given else None


def _check_offered(body: Fields, pool_name: str) -> None:
    if any(body.get(name) for name in _KUBERNETES):
        raise RequestError(
            501,
            "namespaces and quotas of Kubernetes are not offered by the embedded master. Leave them out, or use a "
            "Determined cluster.",
        )
    for name in _POOLS:
        if body.text(name) not in (None, "", pool_name):
            raise body.wrong(name, f"{pool_name!r}, the only pool")


async def create_workspace(request: ApiRequest) -> dict[str, Any]:
    body, user = request.body(), request.user
    _check_offered(body, request.services.settings.pool_name)
    name, storage, group = body.required_text("name"), _storage(body), body.mapping("agentUserGroup")
    workspace_id = await request.services.write(
        lambda tx: workspaces.create(tx, name, user.id, storage, group)
    )
    return message(
        bindings.v1PostWorkspaceResponse, workspace=await _shown(request, workspace_id), namespaceBindings={}
    )


def _editable_workspace(connection: Connection, request: ApiRequest, verb: str) -> workspaces.WorkspaceInfo:
    """Return the workspace in the path; raise 403 if the user may not change it.

    For PATCH, the default workspace raises 400 (immutable) before 403, as in Determined 0.38.1.
    """
    row = workspaces.require(connection, request.path_params["workspace_id"])
    if request.route.method == "PATCH":
        workspaces.refuse_immutable(row, verb)
    require_owner(request.user, row.owner_id, f"workspace {row.name!r}")
    workspaces.refuse_immutable(row, verb)
    return row


async def patch_workspace(request: ApiRequest) -> dict[str, Any]:
    body, workspace_id = request.body(), request.path_params["workspace_id"]
    await request.services.read(_editable_workspace, request, "be changed")
    _check_offered(body, request.services.settings.pool_name)
    name = body.text("name")
    fields: dict[str, Any] = {}
    if body.mapping("checkpointStorageConfig") is not None:
        fields["checkpoint_storage"] = _storage(body)
    if body.mapping("agentUserGroup") is not None:
        fields["agent_user_group"] = body.mapping("agentUserGroup")

    def write(tx: Transaction) -> None:
        row = _editable_workspace(tx.connection, request, "be changed")
        workspaces.refuse_archived(row, "be changed")
        if name is not None:
            workspaces.check_name(tx.connection, name, workspace_id)
            fields["name"] = name
        workspaces.change(tx, workspace_id, **fields)

    await request.services.write(write)
    return message(
        bindings.v1PatchWorkspaceResponse, workspace=await _shown(request, workspace_id), namespaceBindings={}
    )


def _archive(is_archived: bool) -> Callable[[ApiRequest], Any]:
    async def handle(request: ApiRequest) -> dict[str, Any]:
        def write(tx: Transaction) -> None:
            row = _editable_workspace(tx.connection, request, "be archived")
            workspaces.change(tx, row.id, is_archived=is_archived)

        await request.services.write(write)
        return {}

    return handle


async def delete_workspace(request: ApiRequest) -> dict[str, Any]:
    def write(tx: Transaction) -> bool:
        return containers.delete_workspace(tx, _editable_workspace(tx.connection, request, "be deleted").id)

    return message(bindings.v1DeleteWorkspaceResponse, completed=await request.services.write(write))


async def list_pools(request: ApiRequest) -> dict[str, Any]:
    await request.services.read(workspaces.require, request.path_params["workspace_id"])
    page = page_of(1, request.query_int("offset"), request.query_int("limit"))
    return message(
        bindings.v1ListRPsBoundToWorkspaceResponse,
        resourcePools=[request.services.settings.pool_name][page.start : page.end],
        pagination=page.to_json(),
    )


_ONE = "/workspaces/{workspace_id:int}"
routes = [
    route("GET", "/workspaces", list_workspaces, access=USER),
    route("POST", "/workspaces", create_workspace, access=USER),
    route("GET", _ONE, show_workspace, access=USER),
    route("PATCH", _ONE, patch_workspace, access=USER),
    route("DELETE", _ONE, delete_workspace, access=USER),
    route("POST", f"{_ONE}/archive", _archive(True), access=USER),
    route("POST", f"{_ONE}/unarchive", _archive(False), access=USER),
    route("GET", f"{_ONE}/available-resource-pools", list_pools, access=USER),
]
