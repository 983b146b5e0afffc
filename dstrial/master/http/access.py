"""Access checks of requests: Host and Origin, tokens, one-time codes, permissions."""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

from starlette.datastructures import Headers

from dstrial.errors import RequestError
from dstrial.master.http.fields import shown
from dstrial.master.store import checkpoints
from dstrial.master.store.database import Connection
from dstrial.master.store.tokens import AllocationIdentity, Identity, User, find_identity

if TYPE_CHECKING:
    from dstrial.master.services import Services


_LOOPBACK = r"(localhost|127\.0\.0\.1|\[::1\])(:[0-9]{1,5})?"
_HOST = re.compile(_LOOPBACK)
_ORIGIN = re.compile(r"https?://" + _LOOPBACK)
_MAX_TOKEN = 512  # characters

COOKIE = "auth"  # name of the cookie that holds a user's token, as in Determined's web interface

GRANT_COOKIE = "dstrial-service"
"""Name of the cookie that grants access to one task's services, set on the task's host name, TASK.localhost."""

# Header with the token of requests from inside a trial.
ALLOCATION_HEADER = "grpc-metadata-x-allocation-token"

UNAUTHENTICATED = "the token of the request is missing or not valid (any more); log in with `det user login`"

LIFETIME_S = 600.0  # lifetime of a login link
_MAX_LINKS = 16  # codes at a time; a new one replaces the oldest
_MAX_GRANTS = 1000  # codes at a time


def check_host_and_origin(headers: Headers) -> None:
    """Raise HTTP 403 if a request's Host or Origin is not this machine.

    This protects against DNS rebinding.
    """
    hosts = headers.getlist("host")
    if len(hosts) != 1 or not _HOST.fullmatch(hosts[0].lower()):
        raise RequestError(
            403,
            f"the Host of the request is {shown(', '.join(hosts) or None)}; expected localhost, 127.0.0.1 or [::1]. From "
            "another machine, forward a port with `ssh -L 8080:localhost:8080 THIS_MACHINE` and use http://localhost:8080.",
        )
    origin = headers.get("origin")
    if origin is not None and not _ORIGIN.fullmatch(origin.lower()):
        raise RequestError(
            403,
            f"the Origin of the request is {shown(origin)}; expected a page of this machine. Open the master's own page.",
        )


def token_of(headers: Headers) -> tuple[str | None, bool]:
    """Return (token or None, whether no header has a token) of a request.

    If no header has a token, the token is that of the cookie ``COOKIE``.
    """
    for name in ("x-user-token", "authorization", ALLOCATION_HEADER):
        token = _bearer(headers.get(name))
        if token is not None:
            return token, False
    return cookie_of(headers, COOKIE), True


async def identify(services: Services, headers: Headers, method: str, task_id: str | None = None) -> Identity:
    """Return the user and allocation to which a request's token belongs.

    Raises HTTP 401 or 403 if the token is missing or rejected.

    CSRF protection: a request whose token is from a cookie may change state only if its Origin is the master's page. If
    ``task_id`` is not None, the request is for a service of this task. Then the cookie ``GRANT_COOKIE`` is read instead, which
    must hold a code of ``ServiceGrants`` for the task.
    """
    token, is_cookie = token_of(headers)
    if is_cookie and task_id is not None:
        token = services.grants.token_of(cookie_of(headers, GRANT_COOKIE), task_id)
    if token is None or len(token) > _MAX_TOKEN:
        raise RequestError(401, UNAUTHENTICATED)
    identity = await services.read(find_identity, token)
    if identity is None:
        raise RequestError(401, UNAUTHENTICATED)
    if identity.allocation is None and not identity.user.active:
        raise RequestError(403, "user is not active")
    if is_cookie and method != "GET":
        origin = headers.get("origin", "").lower()
        if origin != f"http://{headers['host'].lower()}":
            raise RequestError(
                403,
                f"the Origin of the request is {shown(origin or None)}; expected the master's own page, as a cookie "
                "alone changes nothing. Send the token as `Authorization: Bearer`.",
            )
    return identity


async def is_authenticated(services: Services, headers: Headers, method: str) -> bool:
    try:
        await identify(services, headers, method)
    except RequestError:
        return False
    return True


def require_admin(user: User, what: str) -> None:
    """Raise HTTP 403 unless a user is an administrator.

    ``what`` is the action in the error message, for example "change other users".
    """
    if not user.admin:
        raise RequestError(
            403,
            f"user {user.username!r} is no administrator; expected one to {what}. Ask with `det -u admin`.",
        )


def require_owner(user: User, owner_id: int, what: str) -> None:
    """Raise HTTP 403 unless a user owns the resource ``what`` or is an administrator.

    ``what`` names the resource in the message, for example "experiment 7".
    """
    if not user.admin and user.id != owner_id:
        raise RequestError(
            403, f"{what} is another user's; expected your own, or an administrator. Ask with `det -u admin`."
        )


def may_use_checkpoint(
    connection: Connection,
    allocation: AllocationIdentity,
    checkpoint_uuid: str,
    *,
    is_change: bool = False,
) -> bool:
    """Return whether an allocation may read or, if ``is_change``, change a checkpoint.

    An allocation may change its experiment's checkpoints, and may also read the checkpoint from which it started. True for a
    checkpoint that does not exist: for this, handlers respond with 404.
    """
    experiment_id = checkpoints.experiment_of(connection, checkpoint_uuid)
    if experiment_id is None or experiment_id == allocation.experiment_id:
        return True
    return not is_change and checkpoints.is_start_of(
        connection, checkpoint_uuid, allocation.trial_id, allocation.id
    )


def _bearer(value: str | None) -> str | None:
    if not value:
        return None
    scheme, _, rest = value.strip().partition(" ")
    if not rest:
        return scheme
    return rest.strip() if scheme.lower() == "bearer" else None


def cookie_of(headers: Headers, wanted: str) -> str | None:
    for part in headers.get("cookie", "").split(";"):
        name, _, value = part.strip().partition("=")
        if name == wanted and value:
            return value
    return None


class LoginLinks:
    """One-time codes of login links. Only digests of the codes are stored, in memory."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._codes: OrderedDict[bytes, tuple[int, float]] = OrderedDict()

    def create(self, user_id: int) -> str:
        code = secrets.token_urlsafe(32)
        self._codes[_digest_of(code)] = user_id, self._clock() + LIFETIME_S
        while len(self._codes) > _MAX_LINKS:
            self._codes.popitem(last=False)
        return code

    def spend(self, code: str) -> int | None:
        """Consume a code; return its user's id, or None if it is unknown or expired."""
        found = self._codes.pop(_digest_of(code), None)
        return None if found is None or self._clock() > found[1] else found[0]


class ServiceGrants:
    """In-memory codes, each of which grants a browser access to one task's services.

    A code maps to the token of the user who opened the service. Beyond ``_MAX_GRANTS`` codes, the least recently used code is
    removed.
    """

    def __init__(self) -> None:
        self._tokens: OrderedDict[bytes, tuple[str, str]] = OrderedDict()

    def create(self, token: str, task_id: str) -> str:
        code = secrets.token_urlsafe(32)
        self._tokens[_digest_of(code)] = token, task_id
        if len(self._tokens) > _MAX_GRANTS:
            self._tokens.popitem(last=False)
        return code

    def token_of(self, code: str | None, task_id: str) -> str | None:
        digest = _digest_of(code or "")
        token, granted_id = self._tokens.get(digest, (None, ""))
        if granted_id != task_id:
            return None
        self._tokens.move_to_end(digest)
        return token

    def renew(self, code: str, task_id: str) -> str | None:
        """Replace a code from a URL by a new code for a cookie; return the new code.

        None if ``code`` does not grant access to the services of task ``task_id``.
        """
        token = self.token_of(code, task_id)
        if token is None:
            return None
        del self._tokens[_digest_of(code)]
        return self.create(token, task_id)


def _digest_of(code: str) -> bytes:
    return hashlib.sha256(code.encode("utf-8", "surrogateescape")).digest()
