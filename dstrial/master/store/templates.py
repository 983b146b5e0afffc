"""Templates: parts of experiment configs that are kept under a name."""

from __future__ import annotations

import dataclasses
import json
import sqlite3
from collections.abc import Mapping
from typing import Any

from dstrial.master.store.database import Transaction, fetch_all, fetch_one
from dstrial.master.store.errors import ConflictError, Hint, InvalidError, NotFoundError


@dataclasses.dataclass(frozen=True, slots=True)
class Template:
    """A row of templates; ``schema.sql`` says what the columns hold."""

    name: str
    config: str
    workspace_id: int


def list_templates(connection: sqlite3.Connection) -> list[Template]:
    """Return all templates by name."""
    return fetch_all(Template, connection, "SELECT * FROM templates ORDER BY name")


def require(connection: sqlite3.Connection, name: str) -> Template:
    """Return one template.

    Raises:
        NotFoundError: there is none.
    """
    row = fetch_one(Template, connection, "SELECT * FROM templates WHERE name = ?", (name,))
    if row is None:
        raise NotFoundError(f"template {name[:80]!r} is not found", Hint.LIST_TEMPLATES)
    return row


def refuse_existing(connection: sqlite3.Connection, name: str) -> None:
    """Refuse a name that is empty (400) or in use (409)."""
    if not name.strip():
        raise InvalidError("the template's name is empty; expected a text. Choose a name.")
    if connection.execute("SELECT 1 FROM templates WHERE name = ?", (name,)).fetchone() is not None:
        raise ConflictError(
            f"template {name[:80]!r} exists; expected a name that is not in use.", Hint.SET_TEMPLATE
        )


def create(tx: Transaction, name: str, config: Mapping[str, Any], workspace_id: int) -> None:
    """Store a template.

    Raises:
        StoreError: see :func:`refuse_existing`.
    """
    refuse_existing(tx.connection, name)
    tx.execute("INSERT INTO templates VALUES (?, ?, ?)", (name, json.dumps(config), workspace_id))


def change(tx: Transaction, name: str, config: Mapping[str, Any]) -> None:
    """Replace a template's config; experiments that were made with it keep theirs."""
    tx.execute("UPDATE templates SET config = ? WHERE name = ?", (json.dumps(config), name))


def rename(tx: Transaction, old: str, new: str) -> None:
    """Give a template another name.

    Raises:
        StoreError: unknown, and see :func:`refuse_existing`.
    """
    require(tx.connection, old)
    refuse_existing(tx.connection, new)
    tx.execute("UPDATE templates SET name = ? WHERE name = ?", (new, old))


def delete(tx: Transaction, name: str) -> None:
    """Delete a template."""
    tx.execute("DELETE FROM templates WHERE name = ?", (name,))
