"""Wait for what another process does, with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable

_SHORTEST_S, _LONGEST_S = 0.02, 0.25
"""Between two looks: what takes long is looked for less often, since each look at a master takes milliseconds of it."""


def wait_for(condition: Callable[[], object], what: str = "", *, deadline_s: float = 60.0) -> None:
    """Return as soon as the condition holds; fail with ``what`` when the deadline has passed."""
    began_s = time.monotonic()
    give_up_at_s = began_s + deadline_s
    while not condition():
        assert time.monotonic() < give_up_at_s, what or f"not so after {deadline_s:g} s"
        sleep_a_little(began_s)


def sleep_a_little(began_s: float) -> None:
    """Sleep a twentieth of what was waited since ``began_s``, of ``time.monotonic()``, within limits."""
    time.sleep(min(max((time.monotonic() - began_s) / 20, _SHORTEST_S), _LONGEST_S))
