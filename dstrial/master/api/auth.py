"""Routes for login, logout, the current user, and access tokens (``det token``).

Source: Determined 0.38.1 ``master/internal/api_auth.go`` and ``master/internal/token``. In Determined, access tokens are an
Enterprise feature, and only administrators create them. Here users may also create, see and change their own access tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import orjson
from determined.common.api import bindings
from starlette.responses import Response

from dstrial.errors import RequestError
from dstrial.master.api.users import require_by_name, user_json
from dstrial.master.clock import format_us, now_us
from dstrial.master.http.access import COOKIE, require_admin
from dstrial.master.http.fields import shown
from dstrial.master.http.responses import message, page_of
from dstrial.master.http.router import OWNER, PUBLIC, USER, ApiRequest, reads, route, writes
from dstrial.master.store import tokens, users
from dstrial.master.store.database import Connection, Transaction
from dstrial.master.store.tokens import AccessToken

_MAX_LOGIN_BYTES = 64 * 1024  # body of a login
_MAX_LINK_BYTES = 1024  # body with a login link's code

_DAY_US = 24 * 3600 * 1_000_000
_MAX_DAYS = 36500  # longest lifespan of an access token
_DEFAULT_DAYS = 30  # lifespan of an access token if the client sends none
_UNLIMITED = "-1"  # the client's lifespan of a token that never expires
_HOURS = re.compile(r"(\d{1,7})h")

# Hash that is compared if the user is unknown, so that the response takes as long as after a wrong password.
_UNKNOWN_USER_HASH = users.stored_hash("0")


async def log_in(request: ApiRequest) -> Response:
    body = request.body()
    username = body.required_text("username")
    password = body.text("password") or ""
    hashed = password if body.flag("isHashed") else users.client_hash(password)
    services = request.services
    row = await services.read(users.find_by_name, username)
    stored = _UNKNOWN_USER_HASH if row is None else row.password_hash

    async with services.password_lock:
        is_right = await services.run(lambda: users.is_password(stored, hashed))
    if row is None or not is_right:
        raise RequestError(401, "invalid credentials")
    user_id = row.id

    def give_token(tx: Transaction) -> tuple[str, tokens.User]:
        # The password may have changed since the comparison above.
        if users.find_by_id(tx.connection, user_id).password_hash != stored:
            raise RequestError(401, "invalid credentials")
        return _new_token(tx, user_id)

    return _with_cookie(*await services.write(give_token))


def _new_token(tx: Transaction, user_id: int) -> tuple[str, tokens.User]:
    row = users.find_by_id(tx.connection, user_id)
    _require_active(row)
    return tokens.create_token(tx, user_id), row.without_password()


def _require_active(row: users.StoredUser) -> None:
    if not row.active:
        raise RequestError(403, "user is not active")


def _with_cookie(token: str, user: tokens.User) -> Response:
    answer = message(bindings.v1LoginResponse, token=token, user=user_json(user))
    response = Response(orjson.dumps(answer), media_type="application/json")
    response.set_cookie(COOKIE, token, path="/", httponly=True, samesite="strict")
    return response


@writes
def log_owner_in(tx: Transaction, request: ApiRequest) -> dict[str, Any]:
    """Log in without a password; return Determined's login response.

    The operating system user that runs the master may log in as any user.
    """
    row = require_by_name(tx.connection, request.body().required_text("username"))
    token, user = _new_token(tx, row.id)
    return message(bindings.v1LoginResponse, token=token, user=user_json(user))


async def make_link(request: ApiRequest) -> dict[str, Any]:
    row = await request.services.read(require_by_name, request.body().required_text("username"))
    _require_active(row)
    return {"code": request.services.links.create(row.id)}


async def spend_link(request: ApiRequest) -> Response:
    """Exchange a login link's one-time code for a session token, also set as a cookie."""
    origin = request.headers.get("origin", "").lower()
    # Prevents login CSRF: another site that knows a code must not log its visitor in as a user of its choice.
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
    return _with_cookie(*await request.services.write(lambda tx: _new_token(tx, user_id)))


async def log_out(request: ApiRequest) -> Response:
    """Revoke the request's session token and delete the cookie; keep access tokens."""
    identity = request.identity
    assert identity is not None
    await request.services.write(lambda tx: tokens.end_token(tx, identity.token_hash))
    response = Response(b"{}", media_type="application/json")
    response.delete_cookie(COOKIE, path="/", httponly=True, samesite="strict")
    return response


async def show_me(request: ApiRequest) -> dict[str, Any]:
    return {"user": user_json(request.user)}


_ORDER: dict[str, Callable[[AccessToken], Any]] = {
    "": lambda one: one.id,
    "SORT_BY_USER_ID": lambda one: one.user_id,
    "SORT_BY_EXPIRY": lambda one: (one.expires_us is None, one.expires_us or 0),
    "SORT_BY_CREATED_AT": lambda one: one.created_us,
    "SORT_BY_REVOKED": lambda one: (one.revoked_us is None, one.revoked_us or 0),
    "SORT_BY_DESCRIPTION": lambda one: one.description,
}


def _token_json(token: AccessToken) -> dict[str, Any]:
    return message(
        bindings.v1TokenInfo,
        id=token.id,
        userId=token.user_id,
        createdAt=format_us(token.created_us),
        expiry=None if token.expires_us is None else format_us(token.expires_us),
        description=token.description,
        revoked=token.revoked_us is not None,
        tokenType=bindings.v1TokenType.ACCESS_TOKEN.value,
    )


def _expiry_us(lifespan: str | None) -> int | None:
    """Return when a new access token expires, in microseconds since the epoch.

    ``lifespan`` is the client's text, such as "48h". None is returned for "-1", a token that never expires.
    """
    if lifespan == _UNLIMITED:
        return None
    days: float = _DEFAULT_DAYS
    if lifespan is not None:
        found = _HOURS.fullmatch(lifespan)
        days = int(found[1]) / 24 if found else 0
    if not 0 < days <= _MAX_DAYS:
        raise RequestError(
            400,
            f"lifespan is {shown(lifespan)}; expected hours, 48h for example, above zero and of at most {_MAX_DAYS} "
            "days, or -1 for an unlimited one. Pass a number of days to --expiration-days.",
        )
    return now_us() + int(days * _DAY_US)


@writes
def create_token(tx: Transaction, request: ApiRequest) -> dict[str, Any]:
    body, identity = request.body(), request.identity
    user_id, description = body.required_integer("userId"), body.text("description") or ""
    _require_own_or_admin(request, user_id, "make access tokens of other users")
    assert identity is not None
    if identity.is_of_task or identity.is_access_token:
        raise RequestError(
            403,
            "the token of a task or a script makes no other tokens, which could outlive it; expected that of a login. Log in "
            "with `det user login`.",
        )
    expires_us = _expiry_us(body.text("lifespan"))
    token_id, token = tokens.create_access_token(tx, user_id, description, expires_us)
    return message(bindings.v1PostAccessTokenResponse, token=token, tokenId=token_id)


@reads
def list_tokens(connection: Connection, request: ApiRequest) -> dict[str, Any]:
    username = request.query("username") or None
    user_id = None if request.user.admin else request.user.id
    if username is not None:
        user_id = require_by_name(connection, username).id
        _require_own_or_admin(request, user_id, "see access tokens of other users")
    ids, now = request.query_ints("tokenIds"), now_us()
    shows_all = request.query_flag("showInactive") or bool(ids)
    found = request.ordered(
        (
            token
            for token in tokens.list_access_tokens(connection, user_id)
            if (shows_all or token.is_active(now)) and (not ids or token.id in ids)
        ),
        _ORDER,
        bindings.v1GetAccessTokensRequestSortBy,
    )
    # Without a limit, return every token: `det token list` never requests a second page.
    page = page_of(len(found), request.query_int("offset"), request.query_int("limit") or -1)
    return message(
        bindings.v1GetAccessTokensResponse,
        tokenInfo=[_token_json(token) for token in found[page.start : page.end]],
        pagination=page.to_json(),
    )


@writes
def patch_token(tx: Transaction, request: ApiRequest) -> dict[str, Any]:
    body, token_id = request.body(), request.path_params["token_id"]
    description, is_revoked = body.text("description"), body.flag("setRevoked") or False
    owner_id = tokens.require_access_token(tx.connection, token_id).user_id
    _require_own_or_admin(request, owner_id, "change access tokens of other users")
    changed = tokens.change_access_token(tx, token_id, description, is_revoked=is_revoked)
    return message(bindings.v1PatchAccessTokenResponse, tokenInfo=_token_json(changed))


def _require_own_or_admin(request: ApiRequest, user_id: int, what: str) -> None:
    if user_id != request.user.id:
        require_admin(request.user, what)


routes = [
    # The body limits are small, as these bodies are read before authentication.
    route("POST", "/auth/login", log_in, access=PUBLIC, max_body_bytes=_MAX_LOGIN_BYTES),
    route("POST", "//owner/login", log_owner_in, access=OWNER, max_body_bytes=_MAX_LOGIN_BYTES),
    route("POST", "//owner/link", make_link, access=OWNER, max_body_bytes=_MAX_LOGIN_BYTES),
    route("POST", "/auth/link", spend_link, access=PUBLIC, max_body_bytes=_MAX_LINK_BYTES),
    route("POST", "/auth/logout", log_out, access=USER),
    route("GET", "/me", show_me, access=USER),
    route("GET", "/tokens", list_tokens, access=USER),
    route("POST", "/tokens", create_token, access=USER),
    route("PATCH", "/tokens/{token_id:int}", patch_token, access=USER),
]
