"""What users have set in Determined's web interface, bounded for each."""

from __future__ import annotations

import dataclasses
import sqlite3
from collections.abc import Sequence

from dstrial.master.store.database import Transaction, fetch_all
from dstrial.master.store.errors import InvalidError

MAX_BYTES = 2**20
"""Most bytes of all settings of one user, keys included."""


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """One setting of a user; ``schema.sql`` says what the columns hold."""

    storage_path: str
    key: str
    value: str


def of_user(connection: sqlite3.Connection, user_id: int) -> list[Setting]:
    """Return a user's settings, by page and key."""
    return fetch_all(
        Setting,
        connection,
        "SELECT storage_path, key, value FROM user_settings WHERE user_id = ? ORDER BY storage_path, key",
        (user_id,),
    )


def store(tx: Transaction, user_id: int, settings: Sequence[Setting]) -> None:
    """Keep settings of a user in place of those of the same page and key.

    An empty value is none.

    Raises:
        InvalidError: all of the user's together would be more than ``MAX_BYTES``.
    """
    for setting in settings:
        place = (user_id, setting.storage_path, setting.key)
        tx.execute("DELETE FROM user_settings WHERE user_id = ? AND storage_path = ? AND key = ?", place)
        if setting.value:
            tx.execute("INSERT INTO user_settings VALUES (?, ?, ?, ?)", (*place, setting.value))
    (num_bytes,) = tx.execute(
        "SELECT COALESCE(SUM(LENGTH(CAST(storage_path || key || value AS BLOB))), 0) FROM user_settings "
        "WHERE user_id = ?",
        (user_id,),
    ).fetchone()
    if num_bytes > MAX_BYTES:
        raise InvalidError(
            f"the settings of the web interface have {num_bytes} bytes; expected at most {MAX_BYTES} for each user. "
            "Reset them on the page, or store less."
        )


def reset(tx: Transaction, user_id: int) -> None:
    """Delete all settings of a user."""
    tx.execute("DELETE FROM user_settings WHERE user_id = ?", (user_id,))
