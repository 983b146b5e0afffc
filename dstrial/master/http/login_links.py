"""Login links: codes from the owner's socket that open a browser session once."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable

LIFETIME_S = 600.0
"""How long a code may be used, seconds."""

_MAX_CODES = 16


class LoginLinks:
    """Unused codes: digests in the master's memory, which end with it.

    Args:
        clock: the time, seconds; it must not go back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._codes: OrderedDict[bytes, tuple[int, float]] = OrderedDict()

    def create(self, user_id: int) -> str:
        """Return a user's new code of 256 random bits; the oldest of too many is dropped."""
        code = secrets.token_urlsafe(32)
        self._codes[_digest(code)] = user_id, self._clock() + LIFETIME_S
        while len(self._codes) > _MAX_CODES:
            self._codes.popitem(last=False)
        return code

    def spend(self, code: str) -> int | None:
        """Use a code up and return whose it is; None if unknown, used or too old."""
        found = self._codes.pop(_digest(code), None)
        return None if found is None or self._clock() > found[1] else found[0]


def _digest(code: str) -> bytes:
    return hashlib.sha256(code.encode("utf-8", "surrogateescape")).digest()
