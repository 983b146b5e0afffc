"""Projects: list, create, change, annotate, archive and delete."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from determined.common.api import bindings

from dstrial.errors import RequestError
from dstrial.master.api.workspaces import named, ordered
from dstrial.master.http.access import require_owner
from dstrial.master.http.fields import Fields
from dstrial.master.http.messages import message, page_of
from dstrial.master.http.router import USER, ApiRequest, route
from dstrial.master.http.serializers import stored, time_or_none
from dstrial.master.lifecycle import containers
from dstrial.master.store import projects, workspaces
from dstrial.master.store.database import Connection, Transaction

_ORDER: dict[str, Callable[[projects.ProjectInfo], Any]] = {
    "SORT_BY_NAME": lambda row: row.name.casefold(),
    "SORT_BY_DESCRIPTION": lambda row: row.description,
    "SORT_BY_CREATION_TIME": lambda row: row.created_us,
    "SORT_BY_LAST_EXPERIMENT_START_TIME": lambda row: row.last_us or 0,
}
_MAX_NOTES_BYTES = 1 << 20


def project_json(row: projects.ProjectInfo) -> dict[str, Any]:
    return message(
        bindings.v1Project,
        id=row.id,
        key=row.key,
        name=row.name,
        workspaceId=row.workspace_id,
        workspaceName=row.workspace_name,
        description=row.description,
        notes=stored(row.notes),
        archived=bool(row.is_shut),
        immutable=bool(row.is_immutable),
        state=f"WORKSPACE_STATE_{row.state}",
        errorMessage=row.error,
        numExperiments=row.num_experiments,
        numActiveExperiments=row.num_active,
        numRuns=row.num_runs,
        lastExperimentStartedAt=time_or_none(row.last_us),
        userId=row.owner_id,
        username=row.username,
    )


async def list_projects(request: ApiRequest) -> dict[str, Any]:
    is_wanted = named(request)
    sort_by = request.query_choice("sortBy", bindings.v1GetWorkspaceProjectsRequestSortBy)
    order = request.query_choice("orderBy", bindings.v1OrderBy)
    workspace_id = request.path_params["workspace_id"]

    def read(connection: Connection) -> list[projects.ProjectInfo]:
        workspaces.require(connection, workspace_id)
        return projects.list_projects(connection, workspace_id)

    found = ordered(
        [row for row in await request.services.read(read) if is_wanted(row)], _ORDER, sort_by, order
    )
    page = page_of(len(found), request.query_int("offset"), request.query_int("limit"))
    return {
        "projects": [project_json(row) for row in found[page.start : page.end]],
        "pagination": page.to_json(),
    }


async def _shown(request: ApiRequest, project_id: int) -> dict[str, Any]:
    return project_json(await request.services.read(projects.require, project_id))


async def show_project(request: ApiRequest) -> dict[str, Any]:
    return {"project": await _shown(request, request.path_params["project_id"])}


async def create_project(request: ApiRequest) -> dict[str, Any]:
    body, user, workspace_id = request.body(), request.user, request.path_params["workspace_id"]
    name, key, description = body.required_text("name"), body.text("key"), body.text("description") or ""

    def write(tx: Transaction) -> int:
        row = workspaces.require(tx.connection, workspace_id)
        workspaces.refuse_immutable(row, "take a project")
        workspaces.refuse_archived(row, "take a project")
        return projects.create(
            tx, workspace_id=workspace_id, name=name, key=key, description=description, owner_id=user.id
        )

    project_id = await request.services.write(write)
    return message(bindings.v1PostProjectResponse, project=await _shown(request, project_id))


def _editable_project(connection: Connection, request: ApiRequest, verb: str) -> projects.ProjectInfo:
    """Return the project in the path; raise 403 if the user may not change it.

    For PATCH, the default project raises 400 (immutable) before 403, as in Determined 0.38.1.
    """
    row = projects.require(connection, request.path_params["project_id"])
    if request.route.method == "PATCH":
        projects.refuse_immutable(row, verb)
    require_owner(request.user, row.owner_id, f"project {row.name!r}")
    projects.refuse_immutable(row, verb)
    return row


async def patch_project(request: ApiRequest) -> dict[str, Any]:
    body = request.body()
    await request.services.read(_editable_project, request, "be changed")
    fields = {name: body.text(name) for name in ("name", "key", "description")}
    changes = {name: value for name, value in fields.items() if value is not None}

    def write(tx: Transaction) -> None:
        row = _editable_project(tx.connection, request, "be changed")
        projects.refuse_shut(row, "be changed")
        if "name" in changes:
            projects.check_name(tx.connection, row.workspace_id, changes["name"], row.id)
        if "key" in changes:
            changes["key"] = projects.check_key(tx.connection, changes["key"], row.id)
        projects.change(tx, row.id, **changes)

    await request.services.write(write)
    return message(
        bindings.v1PatchProjectResponse, project=await _shown(request, request.path_params["project_id"])
    )


def _archive(is_archived: bool) -> Callable[[ApiRequest], Any]:
    async def handle(request: ApiRequest) -> dict[str, Any]:
        def write(tx: Transaction) -> None:
            row = _editable_project(tx.connection, request, "be archived")
            workspaces.refuse_archived(
                workspaces.require(tx.connection, row.workspace_id), "have its projects changed"
            )
            projects.change(tx, row.id, is_archived=is_archived)

        await request.services.write(write)
        return {}

    return handle


async def delete_project(request: ApiRequest) -> dict[str, Any]:
    def write(tx: Transaction) -> bool:
        return containers.delete_project(tx, _editable_project(tx.connection, request, "be deleted").id)

    return message(bindings.v1DeleteProjectResponse, completed=await request.services.write(write))


def _note(given: Fields) -> dict[str, str]:
    return {"name": given.text("name") or "", "contents": given.text("contents") or ""}


async def put_notes(request: ApiRequest) -> dict[str, Any]:
    notes = [_note(given) for given in request.body().field_list("notes") or []]
    if len(json.dumps(notes)) > _MAX_NOTES_BYTES:
        raise RequestError(413, "the notes are longer than 1 MiB; expected less. Shorten them.")

    def write(tx: Transaction) -> None:
        row = projects.require(tx.connection, request.path_params["project_id"])
        projects.refuse_shut(row, "be changed")
        projects.change(tx, row.id, notes=notes)

    await request.services.write(write)
    return {"notes": notes}


_ONE = "/projects/{project_id:int}"
routes = [
    route("GET", "/workspaces/{workspace_id:int}/projects", list_projects, access=USER),
    route("POST", "/workspaces/{workspace_id:int}/projects", create_project, access=USER),
    route("GET", _ONE, show_project, access=USER),
    route("PATCH", _ONE, patch_project, access=USER),
    route("DELETE", _ONE, delete_project, access=USER),
    route("POST", f"{_ONE}/archive", _archive(True), access=USER),
    route("POST", f"{_ONE}/unarchive", _archive(False), access=USER),
    route("PUT", f"{_ONE}/notes", put_notes, access=USER),
]
