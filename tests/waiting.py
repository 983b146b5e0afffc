"""Wait for what another process does, with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_for(condition: Callable[[], object], what: str = "", *, deadline_s: float = 60.0) -> None:
    """Return as soon as the condition holds; fail with ``what`` when the deadline has passed."""
    give_up_at_s = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < give_up_at_s, what or f"not so after {deadline_s:g} s"
        time.sleep(0.02)
