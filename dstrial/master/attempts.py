"""Slow down whoever guesses passwords."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections import OrderedDict
from collections.abc import AsyncIterator

_NUM_FREE = 3
_FIRST_DELAY_S = 0.1
_MAX_DELAY_S = 5.0
_MAX_NAMES = 1000


@dataclasses.dataclass(slots=True)
class _Turn:
    """Whose turn it is to try one name.

    Attributes:
        lock: held by the attempt in progress.
        num_users: attempts that hold it or wait for it, for all of which it must stay the same one.
    """

    lock: asyncio.Lock = dataclasses.field(default_factory=asyncio.Lock)
    num_users: int = 0


class Attempts:
    """Counts failed logins in a row by username, and lets each name try one at a time."""

    def __init__(self) -> None:
        self._failures: OrderedDict[str, int] = OrderedDict()
        self._turns: dict[str, _Turn] = {}

    @contextlib.asynccontextmanager
    async def turn(self, username: str) -> AsyncIterator[None]:
        """Wait for this name's turn: at once after fewer than three failures, then longer with every one."""
        name = username.casefold()
        turn = self._turns.setdefault(name, _Turn())
        turn.num_users += 1
        try:
            async with turn.lock:
                num_counted = self._failures.get(name, 0) - _NUM_FREE
                if num_counted >= 0:
                    await asyncio.sleep(min(_FIRST_DELAY_S * 2 ** min(num_counted, 10), _MAX_DELAY_S))
                yield
        finally:
            turn.num_users -= 1
            if turn.num_users == 0:
                del self._turns[name]

    def record(self, username: str, *, is_success: bool) -> None:
        """Note how an attempt ended."""
        name = username.casefold()
        failures = self._failures.pop(name, 0)
        if not is_success:
            self._failures[name] = failures + 1
            if len(self._failures) > _MAX_NAMES:
                self._failures.popitem(last=False)
