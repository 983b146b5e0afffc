"""Which checkpoint storages are known, by what, and what is to be found in them."""

from __future__ import annotations

import dataclasses
import json
import sqlite3
from collections.abc import Callable, Mapping
from typing import Any

from dstrial.checkpoint.storage_identity import StorageIdentity
from dstrial.master.store.database import Transaction

_KEY = "storage:"


@dataclasses.dataclass(frozen=True, slots=True)
class StoredFiles:
    """What a checkpoint's row says of its files.

    Attributes:
        uuid: the checkpoint.
        experiment_id: whose it is.
        trial_id: whose it is.
        state: ``COMPLETED``, ``DELETED`` and so on.
        steps: batches completed.
        resources: JSON, path -> bytes.
        manifest_sha256: of its manifest as its trial has reported it; None if it has not.
        config: of its experiment, JSON; its ``checkpoint_storage`` says where the files lie.
    """

    uuid: str
    experiment_id: int
    trial_id: int
    state: str
    steps: int
    resources: str
    manifest_sha256: str | None
    config: str


def find(connection: sqlite3.Connection, path: str) -> StorageIdentity | None:
    """Return by what the storage at a path is known; None before its first use."""
    row = connection.execute("SELECT value FROM cluster WHERE key = ?", (_KEY + path,)).fetchone()
    return None if row is None else _identity(path, row["value"])


def all_known(connection: sqlite3.Connection) -> list[StorageIdentity]:
    """Return every storage that has been used, by path."""
    rows = connection.execute(
        "SELECT key, value FROM cluster WHERE key >= ? AND key < ? ORDER BY key", (_KEY, "storage;")
    )
    return [_identity(str(row["key"]).removeprefix(_KEY), row["value"]) for row in rows]


def _identity(path: str, value: str) -> StorageIdentity:
    fields = json.loads(value)
    return StorageIdentity(path, fields["id"], int(fields["device"]), int(fields["inode"]))


def remember(tx: Transaction, identity: StorageIdentity) -> None:
    """Store by what a storage is known from now on."""
    fields = {key: value for key, value in identity.fields().items() if key != "path"}
    tx.execute(
        "INSERT INTO cluster (key, value) VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value",
        (_KEY + identity.path, json.dumps(fields)),
    )


def newest_uuids(
    connection: sqlite3.Connection, is_there: Callable[[Mapping[str, Any]], bool], limit: int
) -> list[str]:
    """Return the checkpoints reported last that have files in a storage.

    Args:
        connection: to read from.
        is_there: says of a ``checkpoint_storage`` section whether it is that storage.
        limit: how many at most.
    """
    experiments = connection.execute(
        "SELECT id, json_extract(config, '$.checkpoint_storage') AS storage FROM experiments e WHERE unmanaged = 0 "
        "AND EXISTS (SELECT 1 FROM checkpoints c WHERE c.experiment_id = e.id "
        "AND c.state IN ('COMPLETED', 'PARTIALLY_DELETED') AND c.deleting_us IS NULL)"
    )
    ids = [int(row["id"]) for row in experiments if is_there(json.loads(row["storage"] or "{}"))]
    rows = connection.execute(
        "SELECT uuid FROM checkpoints WHERE experiment_id IN (SELECT value FROM json_each(?)) "
        "AND state IN ('COMPLETED', 'PARTIALLY_DELETED') AND deleting_us IS NULL ORDER BY report_us DESC LIMIT ?",
        (json.dumps(ids), limit),
    )
    return [str(row["uuid"]) for row in rows]


def all_files(connection: sqlite3.Connection) -> list[StoredFiles]:
    """Return what every checkpoint's row says of its files, oldest first."""
    rows = connection.execute(
        "SELECT c.uuid, c.experiment_id, c.trial_id, c.state, c.steps, c.resources, c.manifest_sha256, e.config "
        "FROM checkpoints c JOIN experiments e ON e.id = c.experiment_id WHERE e.unmanaged = 0 ORDER BY c.report_us"
    )
    return [StoredFiles(*tuple(row)) for row in rows]


def unknown_of(connection: sqlite3.Connection, uuids: list[str]) -> list[str]:
    """Return those of ``uuids`` that are no registered checkpoints."""
    known = {
        str(row["uuid"])
        for uuid in uuids
        for row in connection.execute("SELECT uuid FROM checkpoints WHERE uuid = ?", (uuid,))
    }
    return [uuid for uuid in uuids if uuid not in known]
