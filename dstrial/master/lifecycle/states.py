"""States of experiments and trials, and their transitions."""

from __future__ import annotations

TERMINAL = frozenset({"COMPLETED", "CANCELED", "ERROR"})
STOPPING = frozenset({"STOPPING_COMPLETED", "STOPPING_CANCELED", "STOPPING_ERROR", "STOPPING_KILLED"})
DELETING = frozenset({"DELETING", "DELETE_FAILED"})

END_OF = {
    "STOPPING_COMPLETED": "COMPLETED",
    "STOPPING_CANCELED": "CANCELED",
    "STOPPING_KILLED": "CANCELED",
    "STOPPING_ERROR": "ERROR",
}
"""Stopping state -> its terminal state."""

_SEVERITY = {"STOPPING_COMPLETED": 1, "STOPPING_CANCELED": 2, "STOPPING_ERROR": 3, "STOPPING_KILLED": 4}


def may_follow(state: str, stopping: str) -> bool:
    """Return whether an open state may change to the (more severe) stopping state."""
    if state in TERMINAL or state in DELETING:
        return False
    return _SEVERITY[stopping] > _SEVERITY.get(state, 0)
