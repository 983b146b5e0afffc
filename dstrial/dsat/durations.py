"""Lengths of time as people write them: ``90s``, ``30m``, ``1h30m``, ``45``. Pure."""

from __future__ import annotations

import re

_PARTS = re.compile(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s?)?")


def parse_duration(text: str) -> float:
    """Return seconds.

    Raises:
        ValueError: the text is no length of time above 0.
    """
    found = _PARTS.fullmatch(text.strip().lower())
    seconds = (
        sum(float(part) * unit for part, unit in zip(found.groups(), (3600, 60, 1), strict=True) if part)
        if found
        else 0
    )
    if not seconds:
        raise ValueError(
            f"the value is {text!r}; expected a length of time above 0. Write 30m, 90s or 1h30m."
        )
    return seconds


def format_duration(seconds: float) -> str:
    """Return ``1h05m``, ``3m20s`` or ``12s``."""
    whole = max(round(seconds), 0)
    if whole >= 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02}m"
    return f"{whole // 60}m{whole % 60:02}s" if whole >= 60 else f"{whole}s"
