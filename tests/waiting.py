"""Poll for a condition with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable

_SHORTEST_S, _LONGEST_S = 0.02, 0.25
"""Limits of the polling interval, which grows because polls load the master."""


def wait_for(
    condition: Callable[[], object], what: str | Callable[[], object] = "", *, deadline_s: float = 60.0
) -> None:
    """Wait until the condition is true; at the deadline, fail with message ``what``.

    ``what`` may be a function that returns the message.
    """
    began_s = time.monotonic()
    give_up_at_s = began_s + deadline_s
    while not condition():
        if time.monotonic() >= give_up_at_s:
            raise AssertionError((what() if callable(what) else what) or f"not so after {deadline_s:g} s")
        sleep_a_little(began_s)


def sleep_a_little(began_s: float) -> None:
    """Sleep 1/20 of the time since ``began_s`` (``time.monotonic()``), 0.02 to 0.25 s."""
    time.sleep(min(max((time.monotonic() - began_s) / 20, _SHORTEST_S), _LONGEST_S))
