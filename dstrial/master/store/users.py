"""Users and their passwords.

Clients send the SHA-512 of a fixed salt and the password. The database stores a salted scrypt of this hash, or "" for a blank
password.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import secrets
import sqlite3
from collections.abc import Mapping

from dstrial.master.clock import now_us
from dstrial.master.store.database import Transaction, exists, fetch_one
from dstrial.master.store.errors import ConflictError, Hint, InvalidError, required
from dstrial.master.store.tokens import User

_CLIENT_SALT = "GubPEmmotfiK9TMD6Zdw"
"""Salt of Determined's clients (Determined 0.38.1 ``determined.common.api.salt_and_hash``)."""

_COST = 2**12  # scrypt's N: about 10 ms, as every ``det`` command without a stored token logs in

_MAX_NAME = 256  # characters of a username or display name

FIRST_USERS = {"determined": False, "admin": True}  # users of a new master -> whether administrator


@dataclasses.dataclass(frozen=True, slots=True)
class StoredUser(User):
    password_hash: str = dataclasses.field(repr=False)

    def without_password(self) -> User:
        return User(**{field.name: getattr(self, field.name) for field in dataclasses.fields(User)})


def new_passwords(*, is_blank: bool) -> dict[str, str]:
    """Return username -> password of the first users: random, or "" if ``is_blank``."""
    return {name: "" if is_blank else secrets.token_urlsafe(18) for name in FIRST_USERS}


def has_users(connection: sqlite3.Connection) -> bool:
    return exists(connection, "SELECT 1 FROM users")


def create_first_users(tx: Transaction, passwords: Mapping[str, str]) -> None:
    """Create the users admin and determined (ids 1, 2) with plain-text ``passwords``."""
    for name in sorted(FIRST_USERS):
        create_user(tx, username=name, admin=FIRST_USERS[name], password=client_hash(passwords[name]))


def client_hash(password: str) -> str:
    """Hash a password like Determined's clients; a blank password stays blank."""
    return hashlib.sha512((_CLIENT_SALT + password).encode()).hexdigest() if password else ""


def stored_hash(hashed: str) -> str:
    """Return the salted scrypt of a client's hash of a password; "" stays blank."""
    if not hashed:
        return ""
    salt = secrets.token_bytes(16)
    return f"scrypt${_COST}${salt.hex()}${_scrypt(hashed, salt, _COST).hex()}"


def is_password(stored: str, hashed: str) -> bool:
    """Return whether a client's hash of a password matches the stored hash.

    The comparison takes constant time, except for blank passwords.
    """
    if not stored or not hashed:
        return stored == hashed
    _, cost, salt, expected = stored.split("$")
    return hmac.compare_digest(_scrypt(hashed, bytes.fromhex(salt), int(cost)).hex(), expected)


def _scrypt(hashed: str, salt: bytes, cost: int) -> bytes:
    return hashlib.scrypt(hashed.encode("utf-8", "surrogateescape"), salt=salt, n=cost, r=8, p=1, dklen=32)


def create_user(
    tx: Transaction, *, username: str, admin: bool, password: str, display_name: str = "", active: bool = True
) -> int:
    """Insert a user and return its id; ``password`` is the client's hash, or blank."""
    _check_name(username)
    display_name = _checked_display_name(tx.connection, display_name, None)
    if find_by_name(tx.connection, username) is not None:
        raise _taken(username)
    columns = {"username": username, "display_name": display_name, "password_hash": stored_hash(password)}
    return tx.insert("users", {**columns, "admin": admin, "active": active, "modified_us": now_us()})


def change_user(
    tx: Transaction,
    user_id: int,
    *,
    username: str | None = None,
    display_name: str | None = None,
    admin: bool | None = None,
    active: bool | None = None,
    password: str | None = None,
) -> None:
    """Update fields of a user; raise if no active administrator would remain.

    A field that is None does not change. ``password`` is the client's hash, or blank.
    """
    row = find_by_id(tx.connection, user_id)
    if username is not None and username != row.username:
        _check_name(username)
        other = find_by_name(tx.connection, username)
        if other is not None and other.id != user_id:
            raise _taken(username)
    if display_name is not None and display_name != row.display_name:
        display_name = _checked_display_name(tx.connection, display_name, user_id)
    columns = {
        "username": username,
        "display_name": display_name,
        "admin": admin,
        "active": active,
        "password_hash": None if password is None else stored_hash(password),
        "modified_us": now_us(),
    }
    tx.update("users", user_id, {name: value for name, value in columns.items() if value is not None})
    if not tx.count("users", "admin AND active"):
        raise ConflictError(
            f"user {row.username!r} is the last active administrator; expected one to remain. Make another one first."
        )


def find_by_name(connection: sqlite3.Connection, username: str) -> StoredUser | None:
    return fetch_one(StoredUser, connection, "SELECT * FROM users WHERE username = ?", (username,))


def find_by_id(connection: sqlite3.Connection, user_id: int) -> StoredUser:
    row = fetch_one(StoredUser, connection, "SELECT * FROM users WHERE id = ?", (user_id,))
    return required(row, f"user {user_id}", Hint.LIST_USERS)


def list_users(connection: sqlite3.Connection) -> list[User]:
    rows = connection.execute("SELECT * FROM users ORDER BY username COLLATE NOCASE").fetchall()
    return [User.from_row(row) for row in rows]


def _check_name(username: str) -> None:
    if not username.strip() or len(username) > _MAX_NAME or not username.isprintable():
        raise InvalidError(
            f"username is {username[:80]!r}; expected 1 to {_MAX_NAME} printable characters. Choose another name."
        )


def _checked_display_name(connection: sqlite3.Connection, name: str, own_id: int | None) -> str:
    """Return a stripped display name; raise if it could be mistaken for another user."""
    # Source: Determined 0.38.1, ``PatchUser``.
    name = name.strip()
    if len(name) > _MAX_NAME or not (name.isascii() and name.isprintable()):
        raise InvalidError(
            f"displayName is {name[:80]!r}; expected at most {_MAX_NAME} printable ASCII characters. Choose another name."
        )
    similar = connection.execute(
        "SELECT username FROM users WHERE id IS NOT ? AND lower(?) IN (lower(username), lower(display_name))",
        (own_id, name),
    ).fetchone()
    if name and similar is not None:
        raise InvalidError(
            f"displayName is {name!r}, a name of user {similar['username']!r}; expected a name that no other user has, "
            "whatever its case. Choose another name."
        )
    return name


def _taken(username: str) -> ConflictError:
    return ConflictError(f"user {username!r} already exists; expected a new name. Choose another name.")
