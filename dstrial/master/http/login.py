"""One-time codes for browsers: login links, and grants for task services."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable

LIFETIME_S = 600.0  # of a login link
_MAX_LINKS = 16
_MAX_GRANTS = 1000


class LoginLinks:
    """In-memory store of unused login-link codes, as digests."""

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
        """Consume a code and return its user's id; None if unknown, used or expired."""
        found = self._codes.pop(_digest_of(code), None)
        return None if found is None or self._clock() > found[1] else found[0]


class ServiceGrants:
    """LRU store of codes that grant access to the services of one task."""

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
        """Exchange a one-time code for the cookie's code; None if the code is invalid."""
        token = self.token_of(code, task_id)
        if token is None:
            return None
        del self._tokens[_digest_of(code)]
        return self.create(token, task_id)


def _digest_of(code: str) -> bytes:
    return hashlib.sha256(code.encode("utf-8", "surrogateescape")).digest()
