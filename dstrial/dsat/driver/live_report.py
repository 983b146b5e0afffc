"""Show a search's report where its trials run, while it goes on.

When there is news, and not too often.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from dstrial.dsat.backends.base import Backend

_PERIOD_S = 2.0
# Making a report of many trials takes time that the search has a better use for.
_LEAST_PAUSES = 20.0


class LiveReport:
    """Publishes a report again and again.

    Args:
        make: returns the report of now.
    """

    def __init__(self, make: Callable[[], Mapping[str, Any]]) -> None:
        self._make = make
        self._has_news = False
        self._next_s = 0.0

    def note_news(self) -> None:
        """Take that the report is not what it was."""
        self._has_news = True

    def publish_if_due(self, backend: Backend) -> None:
        """Publish the report if there is news.

        What does not get there is tried again later.
        """
        began_s = time.monotonic()
        if not backend.shows_reports or not self._has_news or began_s < self._next_s:
            return
        self._has_news = not backend.publish(self._make())
        took_s = time.monotonic() - began_s
        self._next_s = began_s + max(_PERIOD_S, _LEAST_PAUSES * took_s)
