"""Bounded retries with exponential backoff."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Hashable


@dataclasses.dataclass(slots=True)
class _Failures:
    count: int
    due_s: float


class Retries:
    """Counts consecutive failures by key.

    Args:
        first_s: delay after the first failure; each further failure doubles it.
        longest_s: longest delay.
        limit: failures after which the caller gives up.
    """

    def __init__(
        self,
        first_s: float = 1.0,
        longest_s: float = 60.0,
        limit: int = 6,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._limit = limit
        self._clock = clock
        self._failures: dict[Hashable, _Failures] = {}

    def is_due(self, key: Hashable) -> bool:
        """Say whether the next attempt may begin."""
        failures = self._failures.get(key)
        return failures is None or self._clock() >= failures.due_s

    def delay_s(self, key: Hashable) -> float:
        """Return in how many seconds the next attempt may begin."""
        failures = self._failures.get(key)
        return 0.0 if failures is None else max(failures.due_s - self._clock(), 0.0)

    def record_failure(self, key: Hashable, *, counts: bool = True) -> bool:
        """Postpone the next attempt; return whether the limit is reached.

        A failure for which the key is not at fault does not count.
        """
        failures = self._failures.setdefault(key, _Failures(0, 0.0))
        failures.count += counts
        delay_s = self._first_s * 2.0 ** max(failures.count - 1, 0)
        failures.due_s = self._clock() + min(delay_s, self._longest_s)
        return failures.count >= self._limit

    def forget(self, key: Hashable) -> None:
        """Begin anew: the key has succeeded, or is gone."""
        self._failures.pop(key, None)
