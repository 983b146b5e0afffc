"""Routes for projects: list, create, change, annotate, archive and delete."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from determined.common.api import bindings

from dstrial.errors import RequestError
from dstrial.master.api.workspaces import is_wanted
from dstrial.master.http.access import require_owner
from dstrial.master.http.responses import message
from dstrial.master.http.router import USER, ApiRequest, reads, route, writes
from dstrial.master.http.serializers import stored, time_or_none
from dstrial.master.lifecycle import experiments
from dstrial.master.store import projects, workspaces
from dstrial.master.store.database import Connection, Transaction

_ORDER: dict[str, Callable[[projects.ProjectInfo], Any]] = {
    "": lambda row: row.id,
    "SORT_BY_NAME": lambda row: row.name.casefold(),
    "SORT_BY_DESCRIPTION": lambda row: row.description,
    "SORT_BY_CREATION_TIME": lambda row: row.created_us,
    "SORT_BY_LAST_EXPERIMENT_START_TIME": lambda row: row.last_us or 0,
}
_MAX_NOTES_BYTES = 1 << 20  # of a project's notes as JSON


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


@reads
def list_projects(connection: Connection, request: ApiRequest) -> dict[str, Any]:
    workspace_id = request.path_params["workspace_id"]
    workspaces.require(connection, workspace_id)
    found = [row for row in projects.list_projects(connection, workspace_id) if is_wanted(request, row)]
    ordered = request.ordered(found, _ORDER, bindings.v1GetWorkspaceProjectsRequestSortBy)
    rows, pagination = request.page(ordered)
    return {"projects": [project_json(row) for row in rows], "pagination": pagination}


def _read_project_json(connection: Connection, project_id: int) -> dict[str, Any]:
    return project_json(projects.require(connection, project_id))


@reads
def show_project(connection: Connection, request: ApiRequest) -> dict[str, Any]:
    return {"project": _read_project_json(connection, request.path_params["project_id"])}


@writes
def create_project(tx: Transaction, request: ApiRequest) -> dict[str, Any]:
    body, row = request.body(), workspaces.require(tx.connection, request.path_params["workspace_id"])
    workspaces.refuse_immutable(row, "take a project")
    workspaces.refuse_archived(row, "take a project")
    project_id = projects.create(
        tx,
        workspace_id=row.id,
        name=body.required_text("name"),
        key=body.text("key"),
        description=body.text("description") or "",
        owner_id=request.user.id,
    )
    return message(bindings.v1PostProjectResponse, project=_read_project_json(tx.connection, project_id))


def _editable_project(connection: Connection, request: ApiRequest, verb: str) -> projects.ProjectInfo:
    """Return the project in the path; raise HTTP 403 if the user may not change it.

    Raises ``InvalidError`` for the default project, which never changes; ``verb`` is the rejected change in the message.
    """
    row = projects.require(connection, request.path_params["project_id"])
    projects.refuse_immutable(row, verb)
    require_owner(request.user, row.owner_id, f"project {row.name!r}")
    return row


@writes
def patch_project(tx: Transaction, request: ApiRequest) -> dict[str, Any]:
    body, row = request.body(), _editable_project(tx.connection, request, "be changed")
    fields = {name: body.text(name) for name in ("name", "key", "description")}
    changes = {name: value for name, value in fields.items() if value is not None}
    projects.refuse_shut(row, "be changed")
    if "name" in changes:
        projects.check_name(tx.connection, row.workspace_id, changes["name"], row.id)
    if "key" in changes:
        changes["key"] = projects.check_key(tx.connection, changes["key"], row.id)
    projects.change(tx, row.id, **changes)
    return message(bindings.v1PatchProjectResponse, project=_read_project_json(tx.connection, row.id))


@writes
def archive_project(tx: Transaction, request: ApiRequest) -> None:
    row = _editable_project(tx.connection, request, "be archived")
    workspace = workspaces.require(tx.connection, row.workspace_id)
    workspaces.refuse_archived(workspace, "have its projects changed")
    projects.change(tx, row.id, is_archived=request.route.path.endswith("/archive"))


@writes
def delete_project(tx: Transaction, request: ApiRequest) -> dict[str, Any]:
    row = _editable_project(tx.connection, request, "be deleted")
    return message(bindings.v1DeleteProjectResponse, completed=experiments.delete_project(tx, row.id))


@writes
def put_notes(tx: Transaction, request: ApiRequest) -> dict[str, Any]:
    notes = [
        {"name": given.text("name") or "", "contents": given.text("contents") or ""}
        for given in request.body().field_list("notes") or []
    ]
    if len(json.dumps(notes)) > _MAX_NOTES_BYTES:
        raise RequestError(413, "the notes are longer than 1 MiB; expected less. Shorten them.")
    row = projects.require(tx.connection, request.path_params["project_id"])
    projects.refuse_shut(row, "be changed")
    projects.change(tx, row.id, notes=notes)
    return {"notes": notes}


_ONE = "/projects/{project_id:int}"
routes = [
    route("GET", "/workspaces/{workspace_id:int}/projects", list_projects, access=USER),
    route("POST", "/workspaces/{workspace_id:int}/projects", create_project, access=USER),
    route("GET", _ONE, show_project, access=USER),
    route("PATCH", _ONE, patch_project, access=USER),
    route("DELETE", _ONE, delete_project, access=USER),
    route("POST", f"{_ONE}/archive", archive_project, access=USER),
    route("POST", f"{_ONE}/unarchive", archive_project, access=USER),
    route("PUT", f"{_ONE}/notes", put_notes, access=USER),
]
