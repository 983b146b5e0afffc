"""Projects and workspaces: the project of a new experiment, and deletion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dstrial.master.lifecycle import experiments
from dstrial.master.store import background_jobs, models, projects, workspaces
from dstrial.master.store import experiments as experiment_rows
from dstrial.master.store.database import Connection, Transaction
from dstrial.master.store.errors import Hint, InvalidError


def project_of_config(
    connection: Connection, project_id: int | None, config: Mapping[str, Any]
) -> projects.ProjectInfo:
    """Return a new experiment's project: from the request, the config or the default.

    If ``project_id`` is at most the default project's (1), the config decides; the config need not be validated yet.

    Source: Determined 0.38.1, precedence of request and config.
    """
    names = [config.get("workspace") or None, config.get("project") or None]
    if project_id is not None and project_id > projects.DEFAULT_ID:
        row = projects.require(connection, project_id)
    elif isinstance(names[0], str) and isinstance(names[1], str):
        row = projects.by_names(connection, names[0], names[1])
    else:
        row = projects.require(connection, projects.DEFAULT_ID)
    projects.refuse_shut(row, "take another experiment")
    return row


def delete_project(tx: Transaction, project_id: int) -> bool:
    """Start deleting a project; return True if it was empty and is already deleted."""
    row = projects.require(tx.connection, project_id)
    projects.refuse_immutable(row, "be deleted")
    held = experiment_rows.of_project(tx.connection, project_id)
    for experiment in held:
        experiments.check_deletable(tx, experiment)
    for experiment in held:
        experiments.delete(tx, experiment.id)
    if not held:
        projects.delete(tx, project_id)
        return True
    projects.change(tx, project_id, state="DELETING", error="")
    background_jobs.request(tx, "delete_project", 0, {"id": project_id})
    return False


def delete_workspace(tx: Transaction, workspace_id: int) -> bool:
    """Start deleting a workspace; return True if it was empty and is already deleted."""
    row = workspaces.require(tx.connection, workspace_id)
    workspaces.refuse_immutable(row, "be deleted")
    model = models.any_name_in(tx.connection, workspace_id)
    if model is not None:
        raise InvalidError(
            f"workspace {row.name!r} has the model {model!r}; expected none.", Hint.MOVE_MODELS
        )
    gone = [delete_project(tx, one.id) for one in projects.list_projects(tx.connection, workspace_id)]
    if all(gone):
        workspaces.delete(tx, workspace_id)
        return True
    workspaces.change(tx, workspace_id, state="DELETING", error="")
    background_jobs.request(tx, "delete_workspace", 0, {"id": workspace_id})
    return False


def finish_project(tx: Transaction, project_id: int) -> None:
    """Delete a project; mark it DELETE_FAILED if experiments remain."""
    left = experiment_rows.of_project(tx.connection, project_id)
    if not left:
        projects.delete(tx, project_id)
        return
    why = next((row.end_reason for row in left if row.end_reason), "it was created during the deletion")
    projects.change(
        tx, project_id, state="DELETE_FAILED", error=f"experiment {left[0].id} could not be deleted: {why}"
    )


def finish_workspace(tx: Transaction, workspace_id: int) -> None:
    """Delete a workspace; mark it DELETE_FAILED if projects or models remain."""
    left = projects.list_projects(tx.connection, workspace_id)
    if left:
        why = f"project {left[0].name!r} could not be deleted: {left[0].error}"
    elif models.any_name_in(tx.connection, workspace_id) is not None:
        why = "a model was created while its projects were deleted"
    else:
        workspaces.delete(tx, workspace_id)
        return
    workspaces.change(tx, workspace_id, state="DELETE_FAILED", error=why)
