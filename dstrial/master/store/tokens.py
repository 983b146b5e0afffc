"""API tokens, stored as SHA-256, and the identities they authenticate.

Users create access tokens for scripts. Logins and allocations create session tokens.
"""

from __future__ import annotations

import dataclasses
import hashlib
import secrets
import sqlite3
from collections.abc import Mapping

from dstrial.master.clock import now_us
from dstrial.master.store.database import Transaction, fetch_all, fetch_one
from dstrial.master.store.errors import Hint, InvalidError, required

_LIFETIME_US = 90 * 24 * 3600 * 1_000_000  # of a session token, 90 days
_ACCESS_TOKENS = "SELECT id, user_id, description, created_us, expires_us, revoked_us FROM access_tokens"
_MAX_DESCRIPTION = 1000  # characters


@dataclasses.dataclass(frozen=True, slots=True)
class User:
    """A user, without the password's hash."""

    id: int
    username: str  # unique, ignoring case
    display_name: str
    admin: bool
    active: bool  # may log in
    modified_us: int
    last_auth_us: int | None

    @classmethod
    def from_row(cls, row: sqlite3.Row) -> User:
        values = {field.name: row[field.name] for field in dataclasses.fields(cls)}
        return cls(**{**values, "admin": bool(row["admin"]), "active": bool(row["active"])})


@dataclasses.dataclass(frozen=True, slots=True)
class AllocationIdentity:
    """The allocation that a token belongs to."""

    id: str
    task_id: str
    trial_id: int
    experiment_id: int
    run_id: int  # number of the run among the trial's allocations


@dataclasses.dataclass(frozen=True, slots=True)
class Identity:
    """Identity of an API token: a user and, for an allocation's token, the allocation."""

    token_hash: str  # of the token: SHA-256, hexadecimal
    user: User  # for an allocation, the owner of its experiment
    allocation: AllocationIdentity | None  # None for a user's token
    expires_us: int | None
    is_access_token: bool = False  # not a session token
    is_of_task: bool = False  # revoked when the allocation ends


def create_token(tx: Transaction, user_id: int) -> str:
    """Create and return a session token for a login; delete all expired tokens."""
    now = now_us()
    tx.execute("DELETE FROM tokens WHERE expires_us < ?", (now,))
    tx.execute("UPDATE users SET last_auth_us = ? WHERE id = ?", (now, user_id))
    token = _new_token()
    columns = {"token_hash": hash_token(token), "kind": "user", "user_id": user_id, "created_us": now}
    tx.insert("tokens", {**columns, "expires_us": now + _LIFETIME_US})
    return token


def keep_allocation_tokens(
    tx: Transaction, allocation_id: str, user_id: int, hashes: Mapping[str, str]
) -> None:
    """Store the tokens of a new allocation; ``hashes`` is kind -> SHA-256.

    A token of kind "allocation" grants access to the allocation's trial only. A token of kind "user" acts for ``user_id``.
    """
    tx.executemany(
        "INSERT INTO tokens (token_hash, kind, user_id, allocation_id, created_us) VALUES (?, ?, ?, ?, ?)",
        [(hash_, kind, user_id, allocation_id, now_us()) for kind, hash_ in hashes.items()],
    )


def end_allocation_tokens(tx: Transaction, allocation_id: str) -> None:
    tx.execute("DELETE FROM tokens WHERE allocation_id = ?", (allocation_id,))


def end_token(tx: Transaction, token_hash: str) -> None:
    tx.execute("DELETE FROM tokens WHERE token_hash = ?", (token_hash,))


def end_user_tokens(tx: Transaction, user_id: int, except_hash: str | None = None) -> None:
    """Revoke a user's session and access tokens, except the one with ``except_hash``.

    Tokens of kind "allocation" stay valid, so that running trials continue.
    """
    tx.execute(
        "DELETE FROM tokens WHERE user_id = ? AND kind = 'user' AND token_hash IS NOT ?",
        (user_id, except_hash),
    )
    tx.execute(
        "UPDATE access_tokens SET revoked_us = ? WHERE user_id = ? AND revoked_us IS NULL AND token_hash IS NOT ?",
        (now_us(), user_id, except_hash),
    )


def find_identity(connection: sqlite3.Connection, token: str) -> Identity | None:
    """Return the identity of a token.

    None means that the token is unknown, revoked or expired, or that its allocation has ended.
    """
    identity = _find_identity(connection, hash_token(token))
    is_expired = identity is not None and identity.expires_us is not None and identity.expires_us < now_us()
    return None if is_expired else identity


def _find_identity(connection: sqlite3.Connection, token_hash: str) -> Identity | None:
    row = connection.execute(
        "SELECT t.kind, t.allocation_id, t.expires_us, a.id AS a_id, a.state AS a_state, a.task_id, a.trial_id, "
        "a.experiment_id, a.run_id, u.* FROM tokens t JOIN users u ON u.id = t.user_id "
        "LEFT JOIN allocations a ON a.id = t.allocation_id WHERE t.token_hash = ?",
        (token_hash,),
    ).fetchone()
    if row is None:
        return _find_access_token(connection, token_hash)
    if row["allocation_id"] is not None and (row["a_id"] is None or row["a_state"] == "TERMINATED"):
        return None
    allocation = None
    if row["kind"] == "allocation":
        allocation = AllocationIdentity(
            row["a_id"], row["task_id"], row["trial_id"], row["experiment_id"], row["run_id"]
        )
    is_of_task = row["allocation_id"] is not None
    return Identity(token_hash, User.from_row(row), allocation, row["expires_us"], is_of_task=is_of_task)


def _find_access_token(connection: sqlite3.Connection, token_hash: str) -> Identity | None:
    row = connection.execute(
        "SELECT t.expires_us, u.* FROM access_tokens t JOIN users u ON u.id = t.user_id "
        "WHERE t.token_hash = ? AND t.revoked_us IS NULL",
        (token_hash,),
    ).fetchone()
    if row is None:
        return None
    return Identity(token_hash, User.from_row(row), None, row["expires_us"], is_access_token=True)


def hash_token(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()


def _new_token() -> str:
    """Return a random token without dashes: `det` parses a leading dash as an option."""
    return secrets.token_urlsafe(32).replace("-", "_")


@dataclasses.dataclass(frozen=True, slots=True)
class AccessToken:
    """An access token without its text; kept after the token expires or is revoked."""

    id: int
    user_id: int
    description: str
    created_us: int
    expires_us: int | None  # None: never
    revoked_us: int | None

    def is_active(self, at_us: int) -> bool:
        return self.revoked_us is None and (self.expires_us is None or self.expires_us > at_us)


def create_access_token(
    tx: Transaction, user_id: int, description: str, expires_us: int | None
) -> tuple[int, str]:
    """Create an access token; return its id and text. Only the text's hash is stored."""
    row = tx.execute("SELECT username, active FROM users WHERE id = ?", (user_id,)).fetchone()
    user = required(row, f"user {user_id}", Hint.LIST_USERS)
    if not user["active"]:
        raise InvalidError(
            f"user {user['username']!r} is not active; expected one that is. Activate it first."
        )
    token = _new_token()
    columns = {"token_hash": hash_token(token), "user_id": user_id, "description": _checked(description)}
    token_id = tx.insert("access_tokens", {**columns, "created_us": now_us(), "expires_us": expires_us})
    return token_id, token


def list_access_tokens(connection: sqlite3.Connection, user_id: int | None) -> list[AccessToken]:
    """Return the access tokens of a user (None: of all users), sorted by id."""
    sql = f"{_ACCESS_TOKENS} WHERE ? IS NULL OR user_id = ? ORDER BY id"
    return fetch_all(AccessToken, connection, sql, (user_id, user_id))


def require_access_token(connection: sqlite3.Connection, token_id: int) -> AccessToken:
    row = fetch_one(AccessToken, connection, f"{_ACCESS_TOKENS} WHERE id = ?", (token_id,))
    return required(row, f"access token {token_id}", Hint.LIST_TOKENS)


def change_access_token(
    tx: Transaction, token_id: int, description: str | None, *, is_revoked: bool
) -> AccessToken:
    """Change the description of an active access token, revoke the token, or both.

    ``description`` None keeps the description. If ``is_revoked`` is false, the token stays valid. Returns the changed token.

    Raises:
        InvalidError: the token has expired or is already revoked.
    """
    now = now_us()
    if not require_access_token(tx.connection, token_id).is_active(now):
        raise InvalidError(
            f"access token {token_id} is no longer active; expected one that is. Make a new one instead."
        )
    if description is not None:
        tx.execute("UPDATE access_tokens SET description = ? WHERE id = ?", (_checked(description), token_id))
    if is_revoked:
        tx.execute("UPDATE access_tokens SET revoked_us = ? WHERE id = ?", (now, token_id))
    return require_access_token(tx.connection, token_id)


def _checked(description: str) -> str:
    if len(description) > _MAX_DESCRIPTION or not (description.isprintable() or description == ""):
        raise InvalidError(
            f"the description is {description[:80]!r}; expected at most {_MAX_DESCRIPTION} printable characters. "
            "Write a shorter one."
        )
    return description
