"""Users: list, create, change, set passwords."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from determined.common.api import bindings

from dstrial.errors import RequestError
from dstrial.master.clock import format_us
from dstrial.master.http.fields import Fields
from dstrial.master.http.messages import message, page_of
from dstrial.master.http.router import ADMIN, USER, ApiRequest, route
from dstrial.master.store import tokens, users
from dstrial.master.store.database import Transaction
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


_SORT_KEYS: dict[str, Callable[[User], Any]] = {
    "SORT_BY_DISPLAY_NAME": lambda user: user.display_name.casefold(),
    "SORT_BY_ADMIN": lambda user: user.admin,
    "SORT_BY_ACTIVE": lambda user: user.active,
    "SORT_BY_MODIFIED_TIME": lambda user: user.modified_us,
    "SORT_BY_LAST_AUTH_TIME": lambda user: user.last_auth_us or 0,
    "SORT_BY_NAME": lambda user: (user.display_name or user.username).casefold(),
}


async def list_all(request: ApiRequest) -> dict[str, Any]:
    active, admin = request.query_flag("active"), request.query_flag("admin")
    name = (request.query("name") or "").casefold()
    sort_by = request.query_choice("sortBy", bindings.v1GetUsersRequestSortBy)
    is_descending = request.query_choice("orderBy", bindings.v1OrderBy) == "ORDER_BY_DESC"
    found = [
        user
        for user in await request.services.read(users.list_users)
        if active in (None, user.active)
        and admin in (None, user.admin)
        and (name in user.username.casefold() or name in user.display_name.casefold())
    ]
    found.sort(
        key=_SORT_KEYS.get(sort_by or "", lambda user: user.username.casefold()), reverse=is_descending
    )
    page = page_of(len(found), request.query_int("offset"), request.query_int("limit"))
    return message(
        bindings.v1GetUsersResponse,
        users=[user_json(user) for user in found[page.start : page.end]],
        pagination=page.to_json(),
    )


async def show(request: ApiRequest) -> dict[str, Any]:
    row = await request.services.read(users.find_by_id, request.path_params["user_id"])
    return {"user": user_json(row.without_password())}


async def show_by_name(request: ApiRequest) -> dict[str, Any]:
    username = request.path_params["username"]
    row = await request.services.read(users.find_by_name, username)
    if row is None:
        raise RequestError(404, f"user {username!r} does not exist; see `det user list --all`")
    return {"user": user_json(row.without_password())}


async def create(request: ApiRequest) -> dict[str, Any]:
    body = request.body()
    user = body.fields("user")
    if user is None:
        raise body.wrong("user", "an object with a username")
    _refuse_foreign(user)
    username = user.required_text("username")
    admin, active, name = user.flag("admin") or False, user.flag("active"), user.text("displayName") or ""
    password = _password(body)
    if password is None:
        raise body.wrong("password", "a password that is not blank")

    def write(tx: Transaction) -> User:
        user_id = users.create_user(
            tx,
            username=username,
            admin=admin,
            password=password,
            display_name=name,
            active=active is not False,
        )
        return users.find_by_id(tx.connection, user_id).without_password()

    return {"user": user_json(await request.services.write(write))}


async def patch(request: ApiRequest) -> dict[str, Any]:
    """Change a user; only administrators may change more than display name, password."""
    body, user_id = request.body(), request.path_params["user_id"]
    given = [name for name in _ADMIN_ONLY if body.get(name) is not None]
    _require_admin(request, user_id, given)
    _refuse_foreign(body)
    username, admin, active = body.text("username"), body.flag("admin"), body.flag("active")
    display_name, password = body.text("displayName"), _password(body)

    def write(tx: Transaction) -> User:
        users.change_user(
            tx,
            user_id,
            username=username,
            display_name=display_name,
            admin=admin,
            active=active,
            password=password,
        )
        _end_tokens(tx, request, user_id, has_password=password is not None, active=active)
        return users.find_by_id(tx.connection, user_id).without_password()

    return {"user": user_json(await request.services.write(write))}


def _password(body: Fields) -> str | None:
    """Return the hashed new password from the body, if any; reject a blank one."""
    password = body.text("password")
    if password is None:
        return None
    if not password:
        raise RequestError(400, "the password is blank; expected at least one character. Choose a password.")
    return password if body.flag("isHashed") else users.client_hash(password)


def _require_admin(request: ApiRequest, user_id: int, admin_only: list[str]) -> None:
    if request.user.admin or (user_id == request.user.id and not admin_only):
        return
    raise RequestError(
        403,
        f"user {request.user.username!r} is no administrator; expected one to change "
        f"{', '.join(admin_only) or 'other users'}. Ask with `det -u admin`.",
    )


def _refuse_foreign(user: Fields) -> None:
    if user.get("remote") or user.get("agentUserGroup"):
        raise RequestError(
            501,
            "remote users and linked agent users are not offered by the embedded master; every trial runs as the "
            "operating system's user who started it",
        )


def _end_tokens(
    tx: Transaction, request: ApiRequest, user_id: int, *, has_password: bool, active: bool | None
) -> None:
    """Revoke a user's tokens after a password change or a deactivation."""
    if has_password or active is False:
        own = request.identity.token_hash if request.identity is not None else None
        tokens.end_user_tokens(tx, user_id, except_hash=None if active is False else own)


routes = [
    route("GET", "/users", list_all, access=USER),
    route("POST", "/users", create, access=ADMIN),
    route("GET", "/users/{user_id:int}", show, access=USER),
    route("PATCH", "/users/{user_id:int}", patch, access=USER),
    route("GET", "/users/{username}/by-username", show_by_name, access=USER),
]
