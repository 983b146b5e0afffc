"""Routes for users: list, show, create, change, set passwords."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from determined.common.api import bindings

from dstrial.errors import RequestError
from dstrial.master.clock import format_us
from dstrial.master.http.access import require_admin
from dstrial.master.http.fields import Fields
from dstrial.master.http.responses import message
from dstrial.master.http.router import ADMIN, USER, ApiRequest, reads, route
from dstrial.master.store import tokens, users
from dstrial.master.store.database import Connection, Transaction
from dstrial.master.store.tokens import User

_ADMIN_ONLY = ("username", "admin", "active")


def user_json(user: User) -> dict[str, Any]:
    return message(
        bindings.v1User,
        id=user.id,
        username=user.username,
        admin=user.admin,
        active=user.active,
        displayName=user.display_name,
        modifiedAt=format_us(user.modified_us),
        lastAuthAt=None if user.last_auth_us is None else format_us(user.last_auth_us),
        remote=False,
    )


_ORDER: dict[str, Callable[[User], Any]] = {
    "": lambda user: user.username.casefold(),
    "SORT_BY_DISPLAY_NAME": lambda user: user.display_name.casefold(),
    "SORT_BY_ADMIN": lambda user: user.admin,
    "SORT_BY_ACTIVE": lambda user: user.active,
    "SORT_BY_MODIFIED_TIME": lambda user: user.modified_us,
    "SORT_BY_LAST_AUTH_TIME": lambda user: user.last_auth_us or 0,
    "SORT_BY_NAME": lambda user: (user.display_name or user.username).casefold(),
}


@reads
def list_users(connection: Connection, request: ApiRequest) -> dict[str, Any]:
    active, admin = request.query_flag("active"), request.query_flag("admin")
    name = (request.query("name") or "").casefold()
    found = (
        user
        for user in users.list_users(connection)
        if active in (None, user.active)
        and admin in (None, user.admin)
        and (name in user.username.casefold() or name in user.display_name.casefold())
    )
    rows, pagination = request.page(request.ordered(found, _ORDER, bindings.v1GetUsersRequestSortBy))
    return message(
        bindings.v1GetUsersResponse, users=[user_json(user) for user in rows], pagination=pagination
    )


def _read_user_json(connection: Connection, user_id: int) -> dict[str, Any]:
    return {"user": user_json(users.find_by_id(connection, user_id).without_password())}


@reads
def show_user(connection: Connection, request: ApiRequest) -> dict[str, Any]:
    return _read_user_json(connection, request.path_params["user_id"])


def require_by_name(connection: Connection, username: str) -> users.StoredUser:
    row = users.find_by_name(connection, username)
    if row is None:
        raise RequestError(404, f"user {username!r} does not exist; see `det user list --all`")
    return row


@reads
def show_user_by_name(connection: Connection, request: ApiRequest) -> dict[str, Any]:
    row = require_by_name(connection, request.path_params["username"])
    return {"user": user_json(row.without_password())}


async def create_user(request: ApiRequest) -> dict[str, Any]:
    body = request.body()
    user = body.fields("user")
    if user is None:
        raise body.wrong("user", "an object with a username")
    _refuse_unsupported(user)
    username = user.required_text("username")
    admin, active, name = user.flag("admin") or False, user.flag("active"), user.text("displayName") or ""
    password = _password(body)
    if password is None:
        raise body.wrong("password", "a password that is not blank")

    def write(tx: Transaction) -> dict[str, Any]:
        user_id = users.create_user(
            tx,
            username=username,
            admin=admin,
            password=password,
            display_name=name,
            active=active is not False,
        )
        return _read_user_json(tx.connection, user_id)

    return await request.services.write(write)


async def patch_user(request: ApiRequest) -> dict[str, Any]:
    """Change a user; non-administrators may change only their own name and password."""
    body, user_id = request.body(), request.path_params["user_id"]
    given = [name for name in _ADMIN_ONLY if body.get(name) is not None]
    if user_id != request.user.id or given:
        require_admin(request.user, f"change {', '.join(given) or 'other users'}")
    _refuse_unsupported(body)
    username, admin, active = body.text("username"), body.flag("admin"), body.flag("active")
    display_name, password = body.text("displayName"), _password(body)
    identity = request.identity
    assert identity is not None

    def write(tx: Transaction) -> dict[str, Any]:
        users.change_user(
            tx,
            user_id,
            username=username,
            display_name=display_name,
            admin=admin,
            active=active,
            password=password,
        )
        if password is not None or active is False:
            tokens.end_user_tokens(tx, user_id, except_hash=None if active is False else identity.token_hash)
        return _read_user_json(tx.connection, user_id)

    return await request.services.write(write)


def _password(body: Fields) -> str | None:
    """Return the salted SHA-512 of a request's new password; None without a password.

    With ``isHashed``, the client has hashed the password already. Raises HTTP 400 if the password is empty.
    """
    password = body.text("password")
    if password is None:
        return None
    if not password:
        raise RequestError(400, "the password is blank; expected at least one character. Choose a password.")
    return password if body.flag("isHashed") else users.client_hash(password)


def _refuse_unsupported(user: Fields) -> None:
    if user.get("remote") or user.get("agentUserGroup"):
        raise RequestError(
            501,
            "remote users and linked agent users are not offered by the embedded master; every trial runs as the "
            "operating system's user who started it",
        )


routes = [
    route("GET", "/users", list_users, access=USER),
    route("POST", "/users", create_user, access=ADMIN),
    route("GET", "/users/{user_id:int}", show_user, access=USER),
    route("PATCH", "/users/{user_id:int}", patch_user, access=USER),
    route("GET", "/users/{username}/by-username", show_user_by_name, access=USER),
]
