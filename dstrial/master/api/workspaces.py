"""The one workspace and its one project, in which every experiment is."""

from __future__ import annotations

import sqlite3
from typing import Any

from determined.common.api import bindings

from dstrial.errors import RequestError
from dstrial.master.api.frame import USER, ApiRequest, route
from dstrial.master.api.messages import message, page_of
from dstrial.master.clock import format_us

WORKSPACE_ID = 1
PROJECT_ID = 1
NAME = "Uncategorized"
"""Of the workspace and of the project, as on every Determined cluster."""

_ADMIN_ID = 1


def _counts(connection: sqlite3.Connection) -> sqlite3.Row:
    row: sqlite3.Row = connection.execute(
        "SELECT (SELECT COUNT(*) FROM experiments) AS num_experiments, "
        "(SELECT COUNT(*) FROM experiments WHERE state = 'ACTIVE') AS num_active, "
        "(SELECT COUNT(*) FROM trials) AS num_trials, (SELECT MAX(start_us) FROM experiments) AS last_us, "
        "(SELECT username FROM users WHERE id = ?) AS owner",
        (_ADMIN_ID,),
    ).fetchone()
    return row


def _workspace(counts: sqlite3.Row) -> dict[str, Any]:
    return message(
        bindings.v1Workspace,
        id=WORKSPACE_ID,
        name=NAME,
        archived=False,
        immutable=True,
        pinned=False,
        state="WORKSPACE_STATE_UNSPECIFIED",
        errorMessage="",
        numProjects=1,
        numExperiments=counts["num_experiments"],
        userId=_ADMIN_ID,
        username=counts["owner"],
    )


def _project(counts: sqlite3.Row) -> dict[str, Any]:
    return message(
        bindings.v1Project,
        id=PROJECT_ID,
        key="UNC",
        name=NAME,
        workspaceId=WORKSPACE_ID,
        workspaceName=NAME,
        description="",
        notes=[],
        archived=False,
        immutable=True,
        state="WORKSPACE_STATE_UNSPECIFIED",
        errorMessage="",
        numExperiments=counts["num_experiments"],
        numActiveExperiments=counts["num_active"],
        numRuns=counts["num_trials"],
        lastExperimentStartedAt=None if counts["last_us"] is None else format_us(counts["last_us"]),
        userId=_ADMIN_ID,
        username=counts["owner"],
    )


def _matches(request: ApiRequest, owner: str) -> bool:
    """Whether the only workspace or project is among those that the query asks for."""
    exact, name = request.query("nameCaseSensitive"), request.query("name")
    user_ids, usernames = request.queries("userIds"), request.queries("users")
    return (
        exact in (None, "", NAME)
        and (name or "").casefold() in NAME.casefold()
        and request.query_flag("archived") is not True
        and request.query_flag("pinned") is not True
        and (not user_ids or str(_ADMIN_ID) in user_ids)
        and (not usernames or owner in usernames)
    )


async def list_workspaces(request: ApiRequest) -> dict[str, Any]:
    """``GET workspaces``."""
    counts = await request.services.read(_counts)
    found = [_workspace(counts)] if _matches(request, counts["owner"]) else []
    page = page_of(len(found), request.query_int("offset"), request.query_int("limit"))
    return {"workspaces": found[page.start : page.end], "pagination": page.to_json()}


async def show_workspace(request: ApiRequest) -> dict[str, Any]:
    """``GET workspaces/{id}``."""
    _check("workspace", request.path_params["workspace_id"], WORKSPACE_ID)
    return {"workspace": _workspace(await request.services.read(_counts))}


async def list_projects(request: ApiRequest) -> dict[str, Any]:
    """``GET workspaces/{id}/projects``."""
    _check("workspace", request.path_params["workspace_id"], WORKSPACE_ID)
    counts = await request.services.read(_counts)
    found = [_project(counts)] if _matches(request, counts["owner"]) else []
    page = page_of(len(found), request.query_int("offset"), request.query_int("limit"))
    return {"projects": found[page.start : page.end], "pagination": page.to_json()}


async def show_project(request: ApiRequest) -> dict[str, Any]:
    """``GET projects/{id}``."""
    _check("project", request.path_params["project_id"], PROJECT_ID)
    return {"project": _project(await request.services.read(_counts))}


def check_project(project_id: int | None) -> None:
    """Refuse (404) another project than the only one; None and 0 stand for it."""
    if project_id:
        _check("project", project_id, PROJECT_ID)


def _check(noun: str, asked: int, own: int) -> None:
    if asked != own:
        raise RequestError(
            404, f"{noun} {asked} does not exist; expected {own}, the only one. Name that one."
        )


routes = [
    route("GET", "/workspaces", list_workspaces, access=USER),
    route("GET", "/workspaces/{workspace_id:int}", show_workspace, access=USER),
    route("GET", "/workspaces/{workspace_id:int}/projects", list_projects, access=USER),
    route("GET", "/projects/{project_id:int}", show_project, access=USER),
]
