"""Login, logout, and the current user."""

from __future__ import annotations

from typing import Any

import orjson
from determined.common.api import bindings
from starlette.responses import Response

from dstrial.errors import RequestError
from dstrial.master.api.users import user_json
from dstrial.master.http.access import COOKIE
from dstrial.master.http.fields import shown
from dstrial.master.http.messages import message
from dstrial.master.http.router import OWNER, PUBLIC, USER, ApiRequest, route
from dstrial.master.store import tokens, users
from dstrial.master.store.database import Connection, Transaction

_MAX_LOGIN_BYTES = 64 * 1024
_MAX_LINK_BYTES = 1024

_NOBODY = users.stored_hash("0")  # compared for an unknown user, so that both responses take equally long


async def log_in(request: ApiRequest) -> Response:
    body = request.body()
    username = body.required_text("username")
    password = body.text("password") or ""
    hashed = password if body.flag("isHashed") else users.client_hash(password)
    services = request.services
    row = await services.read(users.find_by_name, username)
    stored = _NOBODY if row is None else row.password_hash

    async def compare() -> bool:
        async with services.password_turn:
            return await services.run(lambda: users.is_password(stored, hashed)) and row is not None

    if not await request.unless_gone(compare()) or row is None:
        raise RequestError(401, "invalid credentials")
    if not row.active:
        raise RequestError(403, "user is not active")
    user_id = row.id

    def give_token(tx: Transaction) -> str:
        # The password may have changed since the comparison above.
        now = users.find_by_id(tx.connection, user_id)
        if now.password_hash != stored or not now.active:
            raise RequestError(401, "invalid credentials")
        return tokens.create_token(tx, user_id)

    return _with_cookie(await services.write(give_token), row.without_password())


def _with_cookie(token: str, user: tokens.User) -> Response:
    answer = message(bindings.v1LoginResponse, token=token, user=user_json(user))
    response = Response(orjson.dumps(answer), media_type="application/json")
    response.set_cookie(COOKIE, token, path="/", httponly=True, samesite="strict")
    return response


async def log_owner_in(request: ApiRequest) -> dict[str, Any]:
    """Return a new token of any user; the owner can read the database anyway."""
    username = request.body().required_text("username")

    def give_token(tx: Transaction) -> tuple[str, tokens.User]:
        row = _require_active(tx.connection, username)
        return tokens.create_token(tx, row.id), row.without_password()

    token, user = await request.services.write(give_token)
    return message(bindings.v1LoginResponse, token=token, user=user_json(user))


def _require_active(connection: Connection, username: str) -> users.StoredUser:
    row = users.find_by_name(connection, username)
    if row is None:
        raise RequestError(
            404,
            f"user {username!r} does not exist; expected one that does. Name another one, admin for example.",
        )
    if not row.active:
        raise RequestError(
            403,
            f"user {username!r} is not active; expected one that is. Name another one, admin for example.",
        )
    return row


async def make_link(request: ApiRequest) -> dict[str, Any]:
    username = request.body().required_text("username")
    row = await request.services.read(_require_active, username)
    return {"code": request.services.links.create(int(row.id))}


async def spend_link(request: ApiRequest) -> Response:
    """Exchange a login link's code for a session token, set as the page's cookie."""
    origin = request.headers.get("origin", "").lower()
    # Login CSRF: another site that knows a code must not log its visitor in as a user of its choice.
    if origin != f"http://{request.headers['host'].lower()}":
        raise RequestError(
            403,
            f"the Origin of the request is {shown(origin or None)}; expected the master's own page. Open the link in a browser.",
        )
    user_id = request.services.links.spend(request.body().required_text("code"))
    if user_id is None:
        raise RequestError(
            401,
            "the login link is unknown, has been used or is too old; expected one of the last ten minutes. Print another "
            "one with `dstrial login`.",
        )

    def give_token(tx: Transaction) -> tuple[str, tokens.User]:
        row = users.find_by_id(tx.connection, user_id)
        if row is None or not row.active:
            raise RequestError(403, "user is not active")
        return tokens.create_token(tx, user_id), row.without_password()

    return _with_cookie(*await request.services.write(give_token))


async def log_out(request: ApiRequest) -> Response:
    """End the request's session; an access token of a script stays valid."""
    identity = request.identity
    assert identity is not None
    await request.services.write(lambda tx: tokens.end_token(tx, identity.token_hash))
    response = Response(b"{}", media_type="application/json")
    response.delete_cookie(COOKIE, path="/", httponly=True, samesite="strict")
    return response


async def show_me(request: ApiRequest) -> dict[str, Any]:
    return {"user": user_json(request.user)}


routes = [
    # Read before authentication.
    route("POST", "/auth/login", log_in, access=PUBLIC, max_body_bytes=_MAX_LOGIN_BYTES),
    route("POST", "//owner/login", log_owner_in, access=OWNER, max_body_bytes=_MAX_LOGIN_BYTES),
    route("POST", "//owner/link", make_link, access=OWNER, max_body_bytes=_MAX_LOGIN_BYTES),
    route("POST", "/auth/link", spend_link, access=PUBLIC, max_body_bytes=_MAX_LINK_BYTES),
    route("POST", "/auth/logout", log_out, access=USER),
    route("GET", "/me", show_me, access=USER),
]
