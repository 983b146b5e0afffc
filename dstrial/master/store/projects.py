"""Queries on projects, which contain experiments."""

from __future__ import annotations

import dataclasses
import re
import secrets
import sqlite3
import string
from typing import Any

from dstrial.master.clock import now_us
from dstrial.master.store.database import Transaction, exists, fetch_all, fetch_one, fetch_value
from dstrial.master.store.errors import ConflictError, Hint, InvalidError, required
from dstrial.master.store.workspaces import check_container_name

DEFAULT_ID = 1  # the project of experiments that were submitted without one

_MAX_KEY = 5  # characters of a key
_PREFIX = 3  # characters of the name with which a generated key starts
_SELECT = (
    "SELECT p.*, COALESCE(u.username, '') AS username, w.name AS workspace_name, w.is_archived OR p.is_archived AS is_shut, "
    "(SELECT COUNT(*) FROM experiments e WHERE e.project_id = p.id) AS num_experiments, "
    "(SELECT COUNT(*) FROM experiments e WHERE e.project_id = p.id AND e.state = 'ACTIVE') AS num_active, "
    "(SELECT COUNT(*) FROM trials t JOIN experiments e ON e.id = t.experiment_id WHERE e.project_id = p.id) AS num_runs, "
    "(SELECT MAX(e.start_us) FROM experiments e WHERE e.project_id = p.id) AS last_us "
    "FROM projects p LEFT JOIN users u ON u.id = p.owner_id JOIN workspaces w ON w.id = p.workspace_id"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Project:
    """A row of table ``projects``, documented in ``schema.sql``."""

    id: int
    workspace_id: int
    name: str
    key: str
    description: str
    notes: str
    owner_id: int
    created_us: int
    is_immutable: bool
    is_archived: bool
    state: str
    error: str


@dataclasses.dataclass(frozen=True, slots=True)
class ProjectInfo(Project):
    username: str
    workspace_name: str
    is_shut: bool  # the project or its workspace is archived
    num_experiments: int
    num_active: int
    num_runs: int
    last_us: int | None


def list_projects(connection: sqlite3.Connection, workspace_id: int) -> list[ProjectInfo]:
    """Return a workspace's projects, sorted by id."""
    return fetch_all(
        ProjectInfo, connection, f"{_SELECT} WHERE p.workspace_id = ? ORDER BY p.id", (workspace_id,)
    )


def require(connection: sqlite3.Connection, project_id: int) -> ProjectInfo:
    row = fetch_one(ProjectInfo, connection, f"{_SELECT} WHERE p.id = ?", (project_id,))
    return required(row, f"project {project_id}", Hint.LIST_PROJECTS)


def by_names(connection: sqlite3.Connection, workspace: str, project: str) -> ProjectInfo:
    """Return a project by workspace name and project name, case-insensitive."""
    row = fetch_one(
        ProjectInfo, connection, f"{_SELECT} WHERE w.name = ? AND p.name = ?", (workspace, project)
    )
    what = f"project {project[:80]!r} in workspace {workspace[:80]!r}"
    return required(row, what, Hint.LIST_OR_CREATE_PROJECTS)


def refuse_shut(row: ProjectInfo, verb: str) -> None:
    """Raise ``InvalidError`` if a project is archived or being deleted.

    A project of an archived workspace counts as archived. ``verb`` is the rejected action in the message, such as "be changed".
    """
    state = "archived" if row.is_shut else "being deleted" if row.state != "UNSPECIFIED" else None
    if state is not None:
        raise InvalidError(
            f"project {row.name!r} of workspace {row.workspace_name!r} is {state} and cannot {verb}; "
            f"expected one that is in use.",
            Hint.UNARCHIVE_PROJECT,
        )


def refuse_immutable(row: Project, verb: str) -> None:
    """Raise ``InvalidError`` if a project is the default project, which never changes.

    ``verb`` is the rejected action in the message, for example "be deleted".
    """
    if row.is_immutable:
        raise InvalidError(
            f"project {row.name!r} is immutable and cannot {verb}; expected one of your own.",
            Hint.CREATE_PROJECT,
        )


def check_name(connection: sqlite3.Connection, workspace_id: int, name: str, own_id: int | None) -> None:
    """Raise unless a project name has 1 to 80 characters and is new in the workspace.

    ``own_id`` is the id of the project to rename; None for a new project.
    """
    sql = "SELECT id FROM projects WHERE workspace_id = ? AND name = ?"
    holder = fetch_value(int, connection, sql, (workspace_id, name))
    check_container_name("project", name, " in this workspace", is_taken=holder not in (None, own_id))


def check_key(connection: sqlite3.Connection, key: str, own_id: int | None) -> str:
    """Return ``key`` in capitals; raise if it is invalid or another project has it.

    A valid key has 1 to 5 letters or digits (Determined 0.38.1). ``own_id`` is the id of the project to change; None for a new
    project.
    """
    if re.fullmatch(rf"[A-Za-z0-9]{{1,{_MAX_KEY}}}", key) is None:
        raise InvalidError(
            f"the project's key is {key[:80]!r}; expected 1 to {_MAX_KEY} letters and digits. Choose another."
        )
    if fetch_value(int, connection, "SELECT id FROM projects WHERE key = ?", (key,)) not in (None, own_id):
        raise ConflictError(f"project key {key!r} is in use; expected one that is not. Choose another.")
    return key.upper()


def create(
    tx: Transaction, *, workspace_id: int, name: str, key: str | None, description: str, owner_id: int
) -> int:
    """Insert a project and return its id; without ``key``, derive one from the name."""
    check_name(tx.connection, workspace_id, name, None)
    kept = check_key(tx.connection, key, None) if key else _new_key(tx.connection, name)
    columns = {"workspace_id": workspace_id, "name": name, "key": kept, "description": description}
    return tx.insert("projects", {**columns, "owner_id": owner_id, "created_us": now_us()})


def _new_key(connection: sqlite3.Connection, name: str) -> str:
    """Return an unused key: up to three characters of the name, then random ones."""
    start = re.sub(r"[^A-Z0-9]", "", name.upper())[:_PREFIX]
    while True:
        rest = "".join(
            secrets.choice(string.ascii_uppercase + string.digits) for _ in range(_MAX_KEY - len(start))
        )
        if not exists(connection, "SELECT 1 FROM projects WHERE key = ?", (start + rest,)):
            return start + rest


def change(tx: Transaction, project_id: int, **fields: Any) -> None:
    """Update columns of a project; ``notes`` is a list of ``{name, contents}``."""
    tx.update("projects", project_id, fields)


def delete(tx: Transaction, project_id: int) -> None:
    """Delete a project, which must not contain experiments."""
    tx.execute("DELETE FROM projects WHERE id = ?", (project_id,))
