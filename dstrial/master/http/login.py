"""Logins: by password, which slows down guessers and nobody else, and by link.

Every password is compared before its sender is made to wait, so that a right one is never held up by wrong ones but for the
comparisons before it (10 ms each). These are made one at a time, and accounts of this machine take turns. A password that has
been right since the master started is known again without such a comparison. A login link holds a code that the owner gets at
the master's socket, and that opens a session in a browser once.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import hashlib
import hmac
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable

from dstrial.errors import RequestError

LIFETIME_S = 600.0
"""How long the code of a login link may be used, seconds."""
_MAX_CODES = 16
_MAX_GRANTS = 1000
_MAX_GRANTS_OF_TOKEN = 50

_NUM_FREE = 3
_FIRST_DELAY_S = 0.1
_MAX_DELAY_S = 5.0
_MAX_NAMES = 1000
_MAX_PENALTIES = 16
"""Wrong passwords of one account whose answer is held back at a time."""
_MAX_QUEUED = 100
"""Passwords of one account that wait to be compared."""


class KnownPasswords:
    """Passwords that were right since the start, as digests with this process's key."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self._digests: OrderedDict[bytes, None] = OrderedDict()

    def add(self, stored: str, hashed: str) -> None:
        """Remember that a client's hash fits a stored one, until the stored one changes."""
        self._digests[self._digest(stored, hashed)] = None
        if len(self._digests) > _MAX_NAMES:
            self._digests.popitem(last=False)

    def __contains__(self, pair: tuple[str, str]) -> bool:
        """Whether a stored hash and a client's have been found to belong together."""
        return self._digest(*pair) in self._digests

    def _digest(self, stored: str, hashed: str) -> bytes:
        return hmac.digest(self._key, f"{stored}\0{hashed}".encode("utf-8", "surrogateescape"), "sha256")


class LoginThrottle:
    """Compares passwords in turn, and delays answers to repeated wrong ones.

    An *account* is the user id of the process that tries, None where it is not known; it is not the name that is tried.
    """

    def __init__(self) -> None:
        self._failures: OrderedDict[tuple[int | None, str], int] = OrderedDict()
        self._num_penalties: collections.Counter[int | None] = collections.Counter()
        self._queues: OrderedDict[int | None, deque[asyncio.Future[None]]] = OrderedDict()
        self._is_comparing = False
        self.known = KnownPasswords()

    async def compare(
        self,
        account: int | None,
        username: str,
        is_right: Callable[[], Awaitable[bool]],
        *,
        is_stranger: bool = False,
    ) -> bool:
        """Return whether a password is right; at once if it is.

        An ``is_stranger`` is neither the master's owner nor unknown: such an account's passwords are not even compared while
        many wrong ones of it wait.

        Raises:
            RequestError: 429, too many wrong passwords of this account wait for their answers.
        """
        if is_stranger and self._num_penalties[account] >= _MAX_PENALTIES:
            raise _too_many()
        async with self._turn(account):
            is_success = await is_right()
        key = account, username.casefold()
        num_failures = self._failures.pop(key, 0) + 1
        if is_success:
            return True
        self._failures[key] = num_failures
        if len(self._failures) > _MAX_NAMES:
            self._failures.popitem(last=False)
        if self._num_penalties[account] >= _MAX_PENALTIES:
            raise _too_many()
        if num_failures > _NUM_FREE:
            self._num_penalties[account] += 1
            try:
                await asyncio.sleep(
                    min(_FIRST_DELAY_S * 2 ** min(num_failures - _NUM_FREE - 1, 10), _MAX_DELAY_S)
                )
            finally:
                self._num_penalties[account] -= 1
        return False

    @contextlib.asynccontextmanager
    async def _turn(self, account: int | None) -> AsyncIterator[None]:
        """Hold the turn while the block lasts: per account in order, accounts in turns."""
        if self._is_comparing:
            queue = self._queues.setdefault(account, deque())
            if len(queue) >= _MAX_QUEUED:
                raise _too_many()
            turn = asyncio.get_running_loop().create_future()
            queue.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._pass_on()
                raise
        self._is_comparing = True
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        """Give the turn to the first of the next account that still waits."""
        while self._queues:
            account, queue = self._queues.popitem(last=False)
            while queue:
                turn = queue.popleft()
                if not turn.done():
                    if queue:
                        self._queues[account] = queue
                    turn.set_result(None)
                    return
        self._is_comparing = False


def _too_many() -> RequestError:
    return RequestError(
        429,
        "too many wrong passwords were sent lately; expected the right one. Wait a few seconds before the next.",
    )


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
        self._codes[_digest_of(code)] = user_id, self._clock() + LIFETIME_S
        while len(self._codes) > _MAX_CODES:
            self._codes.popitem(last=False)
        return code

    def spend(self, code: str) -> int | None:
        """Use a code up and return whose it is; None if unknown, used or too old."""
        found = self._codes.pop(_digest_of(code), None)
        return None if found is None or self._clock() > found[1] else found[0]


class ServiceGrants:
    """Codes that open the services of one task for a user; kept in memory."""

    def __init__(self) -> None:
        self._tokens: OrderedDict[bytes, tuple[str, str]] = OrderedDict()

    def create(self, token: str, task_id: str) -> str:
        """Return a new code; drop the least recently used of too many."""
        code = secrets.token_urlsafe(32)
        self._tokens[_digest_of(code)] = token, task_id
        same = [digest for digest, (holder, _) in self._tokens.items() if holder == token]
        if len(same) > _MAX_GRANTS_OF_TOKEN:
            del self._tokens[same[0]]
        if len(self._tokens) > _MAX_GRANTS:
            self._tokens.popitem(last=False)
        return code

    def token_of(self, code: str | None, task_id: str) -> str | None:
        """Return the token of a code for this task; None for any other code."""
        digest = _digest_of(code or "")
        token, granted_id = self._tokens.get(digest, (None, ""))
        if granted_id != task_id:
            return None
        self._tokens.move_to_end(digest)
        return token

    def renew(self, code: str, task_id: str) -> str | None:
        """Exchange a one-time code for a cookie's code; None if it is not valid."""
        token = self.token_of(code, task_id)
        if token is None:
            return None
        del self._tokens[_digest_of(code)]
        return self.create(token, task_id)


def _digest_of(code: str) -> bytes:
    return hashlib.sha256(code.encode("utf-8", "surrogateescape")).digest()
