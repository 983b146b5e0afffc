"""Queries on workspaces, which contain projects, models and templates."""

from __future__ import annotations

import dataclasses
import sqlite3
from collections.abc import Mapping
from typing import Any

from dstrial.master.clock import now_us
from dstrial.master.store.database import Transaction, exists, fetch_all, fetch_column, fetch_one, fetch_value
from dstrial.master.store.errors import ConflictError, Hint, InvalidError, required

DEFAULT_ID = 1  # the default workspace, which cannot be deleted

_SELECT = (
    "SELECT w.*, COALESCE(u.username, '') AS username, "
    "(SELECT COUNT(*) FROM projects p WHERE p.workspace_id = w.id) AS num_projects, "
    "(SELECT COUNT(*) FROM experiments e JOIN projects p ON p.id = e.project_id WHERE p.workspace_id = w.id) "
    "AS num_experiments "
    "FROM workspaces w LEFT JOIN users u ON u.id = w.owner_id"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Workspace:
    """A row of table ``workspaces``, documented in ``schema.sql``."""

    id: int
    name: str
    owner_id: int
    created_us: int
    is_immutable: bool
    is_archived: bool
    state: str
    error: str
    checkpoint_storage: str | None
    agent_user_group: str | None


@dataclasses.dataclass(frozen=True, slots=True)
class WorkspaceInfo(Workspace):
    username: str
    num_projects: int
    num_experiments: int


def list_workspaces(connection: sqlite3.Connection) -> list[WorkspaceInfo]:
    return fetch_all(WorkspaceInfo, connection, f"{_SELECT} ORDER BY w.id")


def require(connection: sqlite3.Connection, workspace_id: int) -> WorkspaceInfo:
    row = fetch_one(WorkspaceInfo, connection, f"{_SELECT} WHERE w.id = ?", (workspace_id,))
    return required(row, f"workspace {workspace_id}", Hint.LIST_WORKSPACES)


def by_name(connection: sqlite3.Connection, name: str) -> WorkspaceInfo:
    """Return a workspace by name (ignoring case), or raise ``NotFoundError``."""
    row = fetch_one(WorkspaceInfo, connection, f"{_SELECT} WHERE w.name = ?", (name,))
    return required(row, f"workspace {name[:80]!r}", Hint.LIST_WORKSPACES)


def refuse_archived(row: Workspace, verb: str) -> None:
    """Raise ``InvalidError`` if a workspace is archived or being deleted.

    ``verb`` is the rejected action in the message, for example "be changed".
    """
    state = "archived" if row.is_archived else "being deleted" if row.state != "UNSPECIFIED" else None
    if state is not None:
        raise InvalidError(
            f"workspace {row.name!r} is {state} and cannot {verb}; expected one that is in use.",
            Hint.UNARCHIVE_WORKSPACE,
        )


def refuse_immutable(row: Workspace, verb: str) -> None:
    """Raise ``InvalidError`` if a workspace is the default one, which never changes.

    ``verb`` is the rejected action in the message, for example "be deleted".
    """
    if row.is_immutable:
        raise InvalidError(
            f"workspace {row.name!r} is immutable and cannot {verb}; expected one of your own.",
            Hint.CREATE_WORKSPACE,
        )


def check_name(connection: sqlite3.Connection, name: str, own_id: int | None) -> None:
    """Raise unless a name has 1 to 80 characters and no other workspace has it.

    ``own_id`` is the id of the workspace to rename; None for a new workspace.
    """
    holder = fetch_value(int, connection, "SELECT id FROM workspaces WHERE name = ?", (name,))
    check_container_name("workspace", name, is_taken=holder not in (None, own_id))


def check_container_name(kind: str, name: str, where: str = "", *, is_taken: bool) -> None:
    """Raise if the name of a workspace or project is blank, too long or taken.

    A name has at most 80 characters. ``kind`` is "workspace" or "project". If ``is_taken``, another workspace or project has
    the name. ``where`` follows "exists" in the error, for example " in this workspace".
    """
    if not name.strip() or len(name) > 80:
        raise InvalidError(
            f"the {kind}'s name is {name[:80]!r}; expected 1 to 80 characters. Choose another."
        )
    if is_taken:
        raise ConflictError(
            f"{kind} {name!r} exists{where}; expected a name that is not in use, whatever its case. Choose another."
        )


def create(
    tx: Transaction,
    name: str,
    owner_id: int,
    checkpoint_storage: Mapping[str, Any] | None,
    agent_user_group: Mapping[str, Any] | None,
) -> int:
    check_name(tx.connection, name, None)
    settings = {"checkpoint_storage": checkpoint_storage, "agent_user_group": agent_user_group}
    return tx.insert("workspaces", {"name": name, "owner_id": owner_id, "created_us": now_us(), **settings})


def change(tx: Transaction, workspace_id: int, **fields: Any) -> None:
    """Update columns (``fields``: name -> value) of a workspace."""
    tx.update("workspaces", workspace_id, fields)


def delete(tx: Transaction, workspace_id: int) -> None:
    """Delete a workspace, which must be empty, and its templates."""
    tx.execute("DELETE FROM workspaces WHERE id = ?", (workspace_id,))


def owned_by(connection: sqlite3.Connection, user_id: int) -> set[int]:
    return set(fetch_column(int, connection, "SELECT id FROM workspaces WHERE owner_id = ?", (user_id,)))


def name_of(connection: sqlite3.Connection, workspace_id: int) -> str | None:
    return fetch_value(str, connection, "SELECT name FROM workspaces WHERE id = ?", (workspace_id,))


@dataclasses.dataclass(frozen=True, slots=True)
class Template:
    """A named partial experiment config of a workspace."""

    name: str
    config: str
    workspace_id: int


def list_templates(connection: sqlite3.Connection) -> list[Template]:
    return fetch_all(Template, connection, "SELECT * FROM templates ORDER BY name")


def require_template(connection: sqlite3.Connection, name: str) -> Template:
    row = fetch_one(Template, connection, "SELECT * FROM templates WHERE name = ?", (name,))
    return required(row, f"template {name[:80]!r}", Hint.LIST_TEMPLATES)


def create_template(tx: Transaction, name: str, config: Mapping[str, Any], workspace_id: int) -> None:
    """Insert a template; raise ``StoreError`` if the name is empty or in use."""
    if not name.strip():
        raise InvalidError("the template's name is empty; expected a text. Choose a name.")
    if exists(tx.connection, "SELECT 1 FROM templates WHERE name = ?", (name,)):
        raise ConflictError(
            f"template {name[:80]!r} exists; expected a name that is not in use.", Hint.SET_TEMPLATE
        )
    tx.insert("templates", {"name": name, "config": config, "workspace_id": workspace_id})


def change_template(tx: Transaction, name: str, config: Mapping[str, Any]) -> None:
    """Replace a template's config; existing experiments are not affected."""
    tx.update("templates", name, {"config": config}, key="name")


def delete_template(tx: Transaction, name: str) -> None:
    tx.execute("DELETE FROM templates WHERE name = ?", (name,))
