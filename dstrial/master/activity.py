"""When the services of tasks were used last, by the proxy's own clock."""

from __future__ import annotations

import time


class Activity:
    """Remembers each service's last use in memory; safe from any thread."""

    def __init__(self) -> None:
        self._last_s: dict[str, float] = {}

    def touch(self, task_id: str) -> None:
        """Note that somebody uses the service of a task now."""
        self._last_s[task_id] = time.monotonic()

    def idle_s(self, task_id: str) -> float:
        """Return the seconds since the last use; the first question begins the count."""
        return time.monotonic() - self._last_s.setdefault(task_id, time.monotonic())

    def forget(self, task_id: str) -> None:
        """Drop a task that has ended."""
        self._last_s.pop(task_id, None)
