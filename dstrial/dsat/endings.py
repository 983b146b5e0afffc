"""How a search ends: what its caller hears, and which ends on record still hold. Pure."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class SearchEnd:
    """How running a search ended.

    Attributes:
        reason: one line.
        is_finished: whether nothing is left to do; else the same command goes on.
        is_failure: whether the search failed: nothing could be measured.
        stopped_by: the signal that interrupted it; None if none did.
    """

    reason: str
    is_finished: bool
    is_failure: bool = False
    stopped_by: signal.Signals | None = None


def is_final(event: Mapping[str, Any], budget_s: float | None) -> bool:
    """Say whether an end on record holds: one for a spent budget does not where more is given now.

    Args:
        event: of the end.
        budget_s: what is given now; None for no limit.
    """
    spent_s = event.get("budget_s")
    return spent_s is None or (budget_s is not None and budget_s <= spent_s)
