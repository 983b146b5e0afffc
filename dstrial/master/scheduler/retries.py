"""Bounded retries with exponential backoff, and detection of shared faults."""

from __future__ import annotations

import dataclasses
import errno
import time
from collections.abc import Callable, Hashable

from dstrial.errors import DatabaseDamagedError
from dstrial.master import file_limit
from dstrial.master.store.database import Database, IntegrityError, SqlError


@dataclasses.dataclass(slots=True)
class _Failures:
    count: int
    due_s: float


class Retries:
    """Counts consecutive failures by key; computes backoffs before the next attempts.

    Args:
        first_s: delay after the first failure; each further failure doubles it.
        longest_s: longest delay.
        limit: number of failures after which ``record_failure`` returns True.
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
        """Return whether a key's backoff is over, so that it may be tried again."""
        failures = self._failures.get(key)
        return failures is None or self._clock() >= failures.due_s

    def delay_s(self, key: Hashable) -> float:
        """Return the seconds until a key's next attempt; 0 if it is due."""
        failures = self._failures.get(key)
        return 0.0 if failures is None else max(failures.due_s - self._clock(), 0.0)

    def postponed(self) -> dict[Hashable, float]:
        """Return key -> seconds until the next attempt, for keys in backoff."""
        return {key: delay_s for key in self._failures if (delay_s := self.delay_s(key))}

    def record_failure(self, key: Hashable, *, counts: bool = True, limit: int | None = None) -> bool:
        """Postpone a key's next attempt; return whether the limit is reached.

        With ``counts=False``, the failure does not count toward the limit: for failures that the key did not cause. ``limit``
        replaces the object's limit.
        """
        failures = self._failures.setdefault(key, _Failures(0, 0.0))
        failures.count += counts
        delay_s = self._first_s * 2.0 ** max(failures.count - 1, 0)
        failures.due_s = self._clock() + min(delay_s, self._longest_s)
        return counts and failures.count >= (self._limit if limit is None else limit)

    def forget(self, key: Hashable) -> None:
        """Reset a key that has succeeded or no longer exists."""
        self._failures.pop(key, None)


def is_shared_fault(error: BaseException, database: Database) -> bool:
    """Return whether an error affects all trials and jobs, as a full disk does."""
    if isinstance(error, SqlError) and not isinstance(error, IntegrityError):
        return True
    if isinstance(error, DatabaseDamagedError) or file_limit.is_shortage(error):
        return True
    is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return is_full or bool(database.describe_trouble())
