"""Matches log lines of tasks against the patterns of webhooks."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterable, Iterator
from typing import Any

from dstrial.config.schema import compile_pattern
from dstrial.master.pubsub import PubSub
from dstrial.master.store import webhooks
from dstrial.master.store.database import Database


def _compiled(rows: Iterable[webhooks.TriggeredWebhook]) -> Iterator[tuple[int, Any]]:
    for row in rows:
        # Skip a pattern that only another release of RE2 accepts, so that logs are still stored.
        with contextlib.suppress(ValueError):
            yield row.trigger_id, compile_pattern(row.condition)


@dataclasses.dataclass(frozen=True, slots=True)
class LogMatch:
    trigger_id: int
    line: str


class LogTriggers:
    """Compiled patterns, reloaded when webhooks change. Thread-safe.

    RE2's search takes time linear in the text: half a MiB and 50 patterns take about 40 ms.
    """

    def __init__(self, database: Database, pubsub: PubSub) -> None:
        self._database = database
        self._pubsub = pubsub
        self._lock = threading.Lock()
        self._version = -1
        self._patterns: tuple[tuple[int, Any], ...] = ()

    def find(self, lines: Iterable[str]) -> list[LogMatch]:
        """Return the first match per trigger; must not be called in a database read."""
        patterns = self._current()
        if not patterns:
            return []
        texts = [line.rstrip("\r\n") for line in lines]
        joined = "\n".join(texts)
        return [
            LogMatch(trigger_id, line)
            for trigger_id, pattern in patterns
            if pattern.search(joined)
            and (line := next((text for text in texts if pattern.search(text)), None)) is not None
        ]

    def _current(self) -> tuple[tuple[int, Any], ...]:
        version = self._pubsub.version(webhooks.TOPIC)
        with self._lock:
            if version != self._version:
                with self._database.read() as connection:
                    rows = webhooks.triggered(connection, "TASK_LOG")
                self._patterns = tuple(_compiled(rows))
                self._version = version
            return self._patterns
