"""The model registry: models, and checkpoints registered as model versions."""

from __future__ import annotations

import dataclasses
import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any

from dstrial.master.clock import now_us
from dstrial.master.store.database import (
    Conditions,
    Transaction,
    fetch_all,
    fetch_column,
    fetch_one,
    fetch_value,
)
from dstrial.master.store.errors import ConflictError, Hint, InvalidError, required

TOPIC = "models"  # published when a model or version is created, changed or deleted

_ORDER = {
    "SORT_BY_NAME": "m.name",
    "SORT_BY_DESCRIPTION": "m.description",
    "SORT_BY_CREATION_TIME": "m.created_us",
    "SORT_BY_LAST_UPDATED_TIME": "m.updated_us",
    "SORT_BY_NUM_VERSIONS": "num_versions",
    "SORT_BY_WORKSPACE": "w.name",
}
_SELECT = (
    "SELECT m.*, u.username, w.name AS workspace_name, "
    "(SELECT COUNT(*) FROM model_versions v WHERE v.model_id = m.id) AS num_versions "
    "FROM models m JOIN users u ON u.id = m.owner_id JOIN workspaces w ON w.id = m.workspace_id"
)
_VERSION_SELECT = (
    "SELECT v.*, u.username FROM model_versions v JOIN users u ON u.id = v.owner_id WHERE v.model_id = ?"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Model:
    """A row of table ``models``, documented in ``schema.sql``."""

    id: int
    name: str
    description: str
    notes: str
    metadata: str
    labels: str
    owner_id: int
    workspace_id: int
    is_archived: bool
    last_version: int
    created_us: int
    updated_us: int


@dataclasses.dataclass(frozen=True, slots=True)
class Version:
    """A row of table ``model_versions``, documented in ``schema.sql``."""

    id: int
    model_id: int
    version: int
    checkpoint_uuid: str
    name: str
    comment: str
    notes: str
    metadata: str
    labels: str
    owner_id: int
    created_us: int
    updated_us: int


@dataclasses.dataclass(frozen=True, slots=True)
class ModelInfo(Model):
    username: str
    workspace_name: str
    num_versions: int


@dataclasses.dataclass(frozen=True, slots=True)
class VersionInfo(Version):
    username: str


@dataclasses.dataclass(frozen=True, slots=True)
class ModelFilter:
    """Filter of models; a field that is None or empty matches all models."""

    model_id: int | None = None
    archived: bool | None = None  # True: only archived models; False: only others
    name: str | None = None  # substring, case-insensitive
    description: str | None = None  # substring, case-insensitive
    labels: Sequence[str] = ()  # a model must have all of these labels
    users: Sequence[str] = ()
    user_ids: Sequence[int] = ()
    workspace_ids: Sequence[int] = ()
    workspace_names: Sequence[str] = ()


def list_models(
    connection: sqlite3.Connection,
    wanted: ModelFilter,
    *,
    sort_by: str | None = None,
    is_descending: bool = False,
) -> list[ModelInfo]:
    """Return the models that match a filter, sorted by id or ``sort_by``.

    ``sort_by`` is a value of Determined's API such as "SORT_BY_NAME".
    """
    where = Conditions()
    where.need_equal("m.id", wanted.model_id)
    where.need_equal("m.is_archived", wanted.archived)
    where.need_part("m.name", wanted.name)
    where.need_part("m.description", wanted.description)
    where.need_one_of("u.username", wanted.users)
    where.need_one_of("m.owner_id", wanted.user_ids)
    where.need_one_of("m.workspace_id", wanted.workspace_ids)
    where.need_one_of("w.name", wanted.workspace_names)
    where.need_labels("m.labels", wanted.labels)
    order = "DESC" if is_descending else "ASC"
    column = _ORDER.get(sort_by or "", "m.id")
    sql = f"{_SELECT} {where.sql} ORDER BY {column} {order}, m.id {order}"
    return fetch_all(ModelInfo, connection, sql, where.values)


def require(connection: sqlite3.Connection, name_or_id: str) -> ModelInfo:
    """Return a model by name (ignoring case) or id, or raise ``NotFoundError``."""
    row = fetch_one(ModelInfo, connection, f"{_SELECT} WHERE m.name = ?", (name_or_id,))
    if row is None and name_or_id.isdecimal() and len(name_or_id) < 19:
        row = fetch_one(ModelInfo, connection, f"{_SELECT} WHERE m.id = ?", (int(name_or_id),))
    return required(row, f"model {name_or_id[:80]!r}", Hint.LIST_MODELS)


def create(tx: Transaction, *, name: str, owner_id: int, workspace_id: int, **fields: Any) -> int:
    """Insert a model and return its id; ``fields`` are further columns."""
    check_name(tx.connection, name, None)
    now = now_us()
    columns = {"name": name, "owner_id": owner_id, "workspace_id": workspace_id, **fields}
    tx.publish(TOPIC)
    return tx.insert("models", {**columns, "created_us": now, "updated_us": now})


def check_name(connection: sqlite3.Connection, name: str, own_id: int | None) -> None:
    """Raise if a model name is empty, has a slash, is a number, or is in use.

    ``own_id`` is the id of the model to rename; None for a new model.
    A number is not allowed, because request paths contain either a name or an id. Source: Determined 0.38.1.
    """
    if not name.strip() or "/" in name or name.isdecimal():
        raise InvalidError(
            f"the model's name is {name[:80]!r}; expected a text without slashes that is not a number. Choose another."
        )
    if fetch_value(int, connection, "SELECT id FROM models WHERE name = ?", (name,)) not in (None, own_id):
        raise ConflictError(
            f"model {name[:80]!r} exists; expected a name that is not in use. Choose another."
        )


def change(tx: Transaction, model_id: int, **fields: Any) -> None:
    """Update columns of a model, and the time of its last change."""
    _change(tx, "models", model_id, fields)


def delete(tx: Transaction, model_id: int) -> None:
    """Delete a model and its versions but not their checkpoints."""
    tx.execute("DELETE FROM models WHERE id = ?", (model_id,))
    tx.publish(TOPIC)


def labels_by_use(connection: sqlite3.Connection, workspace_id: int | None) -> list[str]:
    """Return the labels of models in a workspace (None: in all), most used first."""
    where = Conditions()
    where.need_equal("m.workspace_id", workspace_id or None)
    sql = f"SELECT value FROM models m, json_each(m.labels) {where.sql} GROUP BY value ORDER BY COUNT(*) DESC, value"  # noqa: S608 - constants
    return fetch_column(str, connection, sql, where.values)


def add_version(tx: Transaction, model_id: int, checkpoint_uuid: str, owner_id: int, **fields: Any) -> int:
    """Register a checkpoint as a model's next version; return the version number.

    ``fields`` are name, comment, notes (strings), metadata (a mapping) and labels (a list of strings).
    """
    now = now_us()
    tx.execute(
        "UPDATE models SET last_version = last_version + 1, updated_us = ? WHERE id = ?", (now, model_id)
    )
    version = int(tx.execute("SELECT last_version FROM models WHERE id = ?", (model_id,)).fetchone()[0])
    columns = {"model_id": model_id, "version": version, "checkpoint_uuid": checkpoint_uuid}
    tx.insert(
        "model_versions", {**columns, "owner_id": owner_id, "created_us": now, "updated_us": now, **fields}
    )
    tx.publish(TOPIC)
    return version


def list_versions(
    connection: sqlite3.Connection, model_id: int, *, by_time: bool = False, is_descending: bool = False
) -> list[VersionInfo]:
    order = "DESC" if is_descending else "ASC"
    column = "v.created_us" if by_time else "v.version"
    return fetch_all(
        VersionInfo, connection, f"{_VERSION_SELECT} ORDER BY {column} {order}, v.id {order}", (model_id,)
    )


def require_version(connection: sqlite3.Connection, model: Model, version: int) -> VersionInfo:
    row = fetch_one(VersionInfo, connection, f"{_VERSION_SELECT} AND v.version = ?", (model.id, version))
    return required(row, f"version {version} of model {model.name!r}", Hint.LIST_VERSIONS)


def change_version(tx: Transaction, row_id: int, model_id: int, **fields: Any) -> None:
    """Change name, comment, notes, metadata or labels of a version.

    ``row_id`` is the id of the version's row, not the version number.
    """
    _change(tx, "model_versions", row_id, fields)
    _change(tx, "models", model_id, {})


def delete_version(tx: Transaction, row_id: int, model_id: int) -> None:
    """Delete a version but not its checkpoint; the version number is not reused.

    ``row_id`` is the id of the version's row, not the version number.
    """
    tx.execute("DELETE FROM model_versions WHERE id = ?", (row_id,))
    _change(tx, "models", model_id, {})


def registered_of(connection: sqlite3.Connection, experiment_id: int) -> list[str]:
    """Return the model versions of an experiment's checkpoints, as ``NAME version N``."""
    rows = connection.execute(
        "SELECT m.name, v.version FROM checkpoints c JOIN model_versions v ON v.checkpoint_uuid = c.uuid "
        "JOIN models m ON m.id = v.model_id WHERE c.experiment_id = ? ORDER BY m.name, v.version",
        (experiment_id,),
    )
    return [f"{row['name']} version {row['version']}" for row in rows]


def _change(tx: Transaction, table: str, row_id: int, fields: Mapping[str, Any]) -> None:
    tx.update(table, row_id, {**fields, "updated_us": now_us()})
    tx.publish(TOPIC)


def any_name_in(connection: sqlite3.Connection, workspace_id: int) -> str | None:
    return fetch_value(str, connection, "SELECT name FROM models WHERE workspace_id = ?", (workspace_id,))
