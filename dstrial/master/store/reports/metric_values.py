"""Metric values: conversion to JSON and numbers, and summaries; pure."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

MAX_LAST_CHARS = 256  # lists of trials contain the last value of each metric, and a text may have megabytes
_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def as_number(value: Any) -> float | None:
    """Return a metric value as a float, also "NaN" and "Infinity"; else None."""
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        return float(value)
    return _WORDS.get(value) if isinstance(value, str) else None


def plain(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics for JSON, with non-finite numbers as strings."""
    return {str(name): _plain_value(value) for name, value in metrics.items()}


def _plain_value(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return plain(value)
    return [_plain_value(item) for item in value] if isinstance(value, list) else value


def summarised(before: Mapping[str, Any] | None, value: Any) -> dict[str, Any]:
    """Return a metric's summary updated by a value; ``before`` is None for the first.

    Numbers have ``{count, sum, mean, min, max, last, type}``, other values ``{count, last, type}`` with the text of ``last``
    truncated to ``MAX_LAST_CHARS``.
    """
    number = as_number(value)
    if number is None:
        kind = {str: "string", bool: "boolean", dict: "object", list: "array"}.get(type(value), "null")
        count = (before or {}).get("count", 0) + 1
        text = value if isinstance(value, str) else json.dumps(value)
        last = value if len(text) <= MAX_LAST_CHARS else f"{text[:MAX_LAST_CHARS]}…"
        return {"count": count, "last": last, "type": kind}
    last = _plain_value(value)
    if before is None or before.get("type") != "number" or "sum" not in before:
        return {
            "count": 1,
            "sum": last,
            "mean": last,
            "min": last,
            "max": last,
            "last": last,
            "type": "number",
        }
    count = before["count"] + 1
    total = _number(before["sum"]) + number
    low, high = _number(before["min"]), _number(before["max"])
    return {
        "count": count,
        "sum": _plain_value(total),
        "mean": _plain_value(total / count),
        "min": _plain_value(number if number < low else low),
        "max": _plain_value(number if number > high else high),
        "last": last,
        "type": "number",
    }


def _number(value: Any) -> float:
    number = as_number(value)
    return math.nan if number is None else number
