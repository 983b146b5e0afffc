"""Exponential backoff after failures of trials, allocations and background jobs."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable


class Backoff:
    """Delays of the next attempts, by key, after consecutive failures.

    Args:
        first_s: delay after the first failure; each further failure doubles it.
        longest_s: longest delay.
    """

    def __init__(
        self, first_s: float = 1.0, longest_s: float = 60.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._clock = clock
        self._failures: dict[Hashable, tuple[float, float]] = {}  # key -> (delay, time of the next attempt)

    def delay_s(self, key: Hashable) -> float:
        """Return the seconds until a key's next attempt; 0 if it is due."""
        return max(self._failures.get(key, (0.0, 0.0))[1] - self._clock(), 0.0)

    def has_failed(self, key: Hashable) -> bool:
        return key in self._failures

    def postponed(self) -> dict[Hashable, float]:
        """Return key -> seconds until the next attempt, for keys that are not due."""
        return {key: delay_s for key in self._failures if (delay_s := self.delay_s(key))}

    def record_failure(self, key: Hashable) -> None:
        delay_s = min(2 * self._failures[key][0] if key in self._failures else self._first_s, self._longest_s)
        self._failures[key] = delay_s, self._clock() + delay_s

    def forget(self, key: Hashable) -> None:
        """Reset a key that has succeeded or no longer exists."""
        self._failures.pop(key, None)
