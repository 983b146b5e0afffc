"""Access tokens: create, list, describe, edit and revoke (``det token``).

Source: Determined 0.38.1 ``master/internal/api_auth.go`` and ``master/internal/token``. In Determined this is an Enterprise
feature, and only administrators create tokens; here users may also create, see and change their own.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from determined.common.api import bindings

from dstrial.errors import RequestError
from dstrial.master.clock import format_us, now_us
from dstrial.master.http.fields import shown
from dstrial.master.http.messages import message, page_of
from dstrial.master.http.router import USER, ApiRequest, route
from dstrial.master.store import tokens, users
from dstrial.master.store.database import Transaction
from dstrial.master.store.tokens import AccessToken

_DAY_US = 24 * 3600 * 1_000_000
_MAX_DAYS = 36500
_INFINITE = "-1"
_PART = re.compile(r"(\d{1,9}(?:\.\d{1,9})?|\.\d{1,9})(ns|us|µs|ms|s|m|h)")
_UNIT_US = {
    "ns": 1e-3,
    "us": 1,
    "µs": 1,
    "ms": 1e3,
    "s": 1e6,
    "m": 60e6,
    "h": 3600e6,
}
_SORT_KEYS: dict[str, Callable[[AccessToken], Any]] = {
    "SORT_BY_USER_ID": lambda one: one.user_id,
    "SORT_BY_EXPIRY": lambda one: (one.expires_us is None, one.expires_us or 0),
    "SORT_BY_CREATED_AT": lambda one: one.created_us,
    "SORT_BY_REVOKED": lambda one: (one.revoked_us is None, one.revoked_us or 0),
    "SORT_BY_DESCRIPTION": lambda one: one.description,
}


def duration_us(text: str) -> int | None:
    """Parse a Go duration such as ``1h30m``; return None if the text is invalid."""
    parts = _PART.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        return None
    return int(sum(float(number) * _UNIT_US[unit] for number, unit in parts)) or None


def _json(token: AccessToken) -> dict[str, Any]:
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


def _expiry(request: ApiRequest, lifespan: str | None) -> int | None:
    """Return the new token's expiry, no later than that of the requesting token."""
    identity = request.identity
    assert identity is not None
    if identity.is_of_task:
        raise RequestError(
            403,
            "the token of a task ends with it and makes none that outlive it; expected a user's own. Log in with "
            "`det user login`.",
        )
    settings = request.services.settings
    limit_days = settings.token_max_days
    limit_us = None if limit_days == -1 else limit_days * _DAY_US
    if lifespan is None:
        default = settings.token_default_days
        lifespan_us = limit_us if default == -1 else default * _DAY_US
    elif lifespan == _INFINITE:
        lifespan_us = limit_us
    else:
        lifespan_us = duration_us(lifespan)
        if lifespan_us is None or lifespan_us > _MAX_DAYS * _DAY_US:
            raise RequestError(
                400,
                f"lifespan is {shown(lifespan)}; expected a duration above zero and of at most {_MAX_DAYS} days, 48h for "
                "example, or -1 for the longest. Pass a number of days to --expiration-days.",
            )
        if limit_us is not None and lifespan_us > limit_us:
            raise RequestError(
                400,
                f"lifespan is {shown(lifespan)}; expected at most {limit_days} days. Ask for less, or raise "
                "security.token.max_lifespan_days in the master's settings.",
            )
    expires_us = None if lifespan_us is None else now_us() + lifespan_us
    if not identity.is_access_token or identity.expires_us is None:
        return expires_us
    if lifespan not in (None, _INFINITE) and expires_us is not None and expires_us > identity.expires_us:
        raise RequestError(
            400,
            f"lifespan is {shown(lifespan)}, which would outlive the access token that asks; expected less. Log in with a "
            "password to make a longer one.",
        )
    return identity.expires_us if expires_us is None else min(expires_us, identity.expires_us)


async def create(request: ApiRequest) -> dict[str, Any]:
    body = request.body()
    user_id, description = body.required_integer("userId"), body.text("description") or ""
    _require_allowed(request, user_id, "make access tokens of other users")
    expires_us = _expiry(request, body.text("lifespan"))
    token_id, token = await request.services.write(
        lambda tx: tokens.create_access_token(tx, user_id, description, expires_us)
    )
    return message(bindings.v1PostAccessTokenResponse, token=token, tokenId=token_id)


async def list_all(request: ApiRequest) -> dict[str, Any]:
    username = request.query("username") or None
    user_id = None if request.user.admin else request.user.id
    if username is not None:
        row = await request.services.read(users.find_by_name, username)
        if row is None:
            raise RequestError(404, f"user {username!r} does not exist; see `det user list --all`")
        _require_allowed(request, row.id, "see access tokens of other users")
        user_id = row.id
    ids, now = request.query_ints("tokenIds"), now_us()
    shows_all = request.query_flag("showInactive") or bool(ids)
    found = [
        token
        for token in await request.services.read(tokens.list_access_tokens, user_id)
        if (shows_all or token.is_active(now)) and (not ids or token.id in ids)
    ]
    sort_by = request.query_choice("sortBy", bindings.v1GetAccessTokensRequestSortBy)
    is_descending = request.query_choice("orderBy", bindings.v1OrderBy) == "ORDER_BY_DESC"
    found.sort(key=_SORT_KEYS.get(sort_by or "", lambda one: one.id), reverse=is_descending)
    # Without a limit, return every token: `det token list` never requests a second page.
    page = page_of(len(found), request.query_int("offset"), request.query_int("limit") or -1)
    return message(
        bindings.v1GetAccessTokensResponse,
        tokenInfo=[_json(token) for token in found[page.start : page.end]],
        pagination=page.to_json(),
    )


async def patch(request: ApiRequest) -> dict[str, Any]:
    body = request.body()
    token_id = request.path_params["token_id"]
    description, is_revoked = body.text("description"), body.flag("setRevoked") or False

    def write(tx: Transaction) -> AccessToken:
        _require_allowed(
            request,
            tokens.require_access_token(tx.connection, token_id).user_id,
            "change access tokens of other users",
        )
        return tokens.change_access_token(tx, token_id, description, is_revoked=is_revoked)

    changed = await request.services.write(write)
    return message(bindings.v1PatchAccessTokenResponse, tokenInfo=_json(changed))


def _require_allowed(request: ApiRequest, user_id: int, what: str) -> None:
    if not request.user.admin and user_id != request.user.id:
        raise RequestError(
            403,
            f"user {request.user.username!r} is no administrator; expected one to {what}. Ask with `det -u admin`.",
        )


routes = [
    route("GET", "/tokens", list_all, access=USER),
    route("POST", "/tokens", create, access=USER),
    route("PATCH", "/tokens/{token_id:int}", patch, access=USER),
]
