"""Rows of access tokens, with which scripts ask in a person's name.

Only a token's SHA-256 is stored. A row stays when its token has ended, so that a list can show what there was.
"""

from __future__ import annotations

import dataclasses
import secrets
import sqlite3

from dstrial.master.clock import now_us
from dstrial.master.store.database import Transaction
from dstrial.master.store.errors import Hint, InvalidError, NotFoundError
from dstrial.master.store.tokens import TOPIC, hash_token

MAX_ACTIVE = 200
"""Most tokens of one user that are valid at a time; a script that makes one at each run is noticed."""

_MAX_DESCRIPTION = 1000


@dataclasses.dataclass(frozen=True, slots=True)
class AccessToken:
    """One row.

    Attributes:
        id: its number.
        user_id: whose it is.
        description: what its owner has written.
        created_us: when it was made.
        expires_us: when it ends by itself; None for never.
        revoked_us: when it was revoked; None if it was not.
    """

    id: int
    user_id: int
    description: str
    created_us: int
    expires_us: int | None
    revoked_us: int | None

    @classmethod
    def from_row(cls, row: sqlite3.Row) -> AccessToken:
        """Read a row of ``access_tokens``."""
        return cls(*(row[field.name] for field in dataclasses.fields(cls)))

    def is_active(self, at_us: int) -> bool:
        """Say whether it is valid at a time."""
        return self.revoked_us is None and (self.expires_us is None or self.expires_us > at_us)


def create(tx: Transaction, user_id: int, description: str, expires_us: int | None) -> tuple[int, str]:
    """Make a token.

    Returns:
        Its number, and the token itself, which is told this once.

    Raises:
        StoreError: no such user, one that is not active, has too many, or a bad description.
    """
    user = tx.execute("SELECT username, active FROM users WHERE id = ?", (user_id,)).fetchone()
    if user is None:
        raise NotFoundError(f"user {user_id} does not exist", Hint.LIST_USERS)
    if not user["active"]:
        raise InvalidError(
            f"user {user['username']!r} is not active; expected one that is. Activate it first."
        )
    now = now_us()
    count = tx.execute(
        "SELECT COUNT(*) FROM access_tokens WHERE user_id = ? AND revoked_us IS NULL "
        "AND (expires_us IS NULL OR expires_us > ?)",
        (user_id, now),
    ).fetchone()[0]
    if count >= MAX_ACTIVE:
        raise InvalidError(
            f"user {user['username']!r} has {count} access tokens; expected fewer than {MAX_ACTIVE}.",
            Hint.REVOKE_TOKENS,
        )
    token = secrets.token_urlsafe(32)
    cursor = tx.execute(
        "INSERT INTO access_tokens (token_hash, user_id, description, created_us, expires_us) VALUES (?, ?, ?, ?, ?)",
        (hash_token(token), user_id, _checked(description), now, expires_us),
    )
    assert cursor.lastrowid is not None
    return cursor.lastrowid, token


def list_tokens(connection: sqlite3.Connection, user_id: int | None) -> list[AccessToken]:
    """Return the tokens of a user, or of all, by number."""
    rows = connection.execute(
        "SELECT * FROM access_tokens WHERE ? IS NULL OR user_id = ? ORDER BY id", (user_id, user_id)
    )
    return [AccessToken.from_row(row) for row in rows]


def require(connection: sqlite3.Connection, token_id: int) -> AccessToken:
    """Return one token.

    Raises:
        NotFoundError: there is none.
    """
    row = connection.execute("SELECT * FROM access_tokens WHERE id = ?", (token_id,)).fetchone()
    if row is None:
        raise NotFoundError(f"access token {token_id} is not found", Hint.LIST_TOKENS)
    return AccessToken.from_row(row)


def change(tx: Transaction, token_id: int, description: str | None, *, is_revoked: bool) -> AccessToken:
    """Change a token's description, or end it; return what it is then.

    Raises:
        StoreError: unknown, one that has ended or a bad description.
    """
    now = now_us()
    if not require(tx.connection, token_id).is_active(now):
        raise InvalidError(
            f"access token {token_id} is no longer active; expected one that is. Make a new one instead."
        )
    if description is not None:
        tx.execute("UPDATE access_tokens SET description = ? WHERE id = ?", (_checked(description), token_id))
    if is_revoked:
        tx.execute("UPDATE access_tokens SET revoked_us = ? WHERE id = ?", (now, token_id))
        tx.publish(TOPIC)
    return require(tx.connection, token_id)


def _checked(description: str) -> str:
    if len(description) > _MAX_DESCRIPTION or not (description.isprintable() or description == ""):
        raise InvalidError(
            f"the description is {description[:80]!r}; expected at most {_MAX_DESCRIPTION} printable characters. "
            "Write a shorter one."
        )
    return description
