"""Summaries of a trial's metrics: one row per metric name, at most ``MAX_NAMES``.

The cost of adding a report depends on the number of its metrics, not on earlier reports.
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Iterable, Mapping
from typing import Any

from dstrial.master.store.database import Transaction, marks
from dstrial.master.store.reports.logs import add_master_line
from dstrial.master.store.trials import Trial

MAX_NAMES = 10_000
"""Summarised metric names per trial, over all groups; lists of trials contain all of them."""

MAX_NAME_CHARS = 256  # per metric or group name (MLflow allows 250); limits summaries to a few MiB per trial

SUMMARY_METRICS = """
(SELECT json_group_object(key, json(names)) FROM (
    SELECT CASE group_name WHEN 'training' THEN 'avg_metrics' WHEN 'validation' THEN 'validation_metrics'
        ELSE group_name END AS key, json_group_object(name, json(summary)) AS names
    FROM metric_summaries WHERE trial_id = t.id GROUP BY 1))"""
"""SQL expression for the summaries of trial ``t``: ``{group key: {name: summary}}``, ``{}`` for none."""

# SQLite accepts at least 999 parameters per statement.
_AT_ONCE = 500
MAX_LAST_CHARS = 256  # lists of trials contain the last value of each metric, and a text may have megabytes
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def add(tx: Transaction, trial: Trial, group: str, values: Mapping[str, Any]) -> None:
    """Update a trial's summaries with ``values``, the metrics of a new report.

    New names beyond ``MAX_NAMES`` get no summary. When the limit is reached, a warning is added to the trial's log.
    """
    before = _summaries(tx.connection, trial.id, group, values)
    new = [name for name in values if name not in before]
    room = max(MAX_NAMES - trial.num_metric_names, 0)
    left_out = set(new[room:])
    summaries = {
        name: summarised(before.get(name), value) for name, value in values.items() if name not in left_out
    }
    _store(tx, trial.id, group, summaries)
    if 0 < room <= len(new):
        text = (
            f"the trial has {MAX_NAMES:,} metric names, and the page shows no further ones; expected fewer. Report under "
            "names that stay the same."
        )
        add_master_line(tx, trial.task_id, trial.id, text, level="WARNING")
    if new and room:
        sql = "UPDATE trials SET num_metric_names = num_metric_names + ? WHERE id = ?"
        tx.execute(sql, (len(new) - len(left_out), trial.id))


def _summaries(
    connection: sqlite3.Connection, trial_id: int, group: str, names: Iterable[str]
) -> dict[str, dict[str, Any]]:
    wanted = list(names)
    found: dict[str, dict[str, Any]] = {}
    for start in range(0, len(wanted), _AT_ONCE):
        some = wanted[start : start + _AT_ONCE]
        rows = connection.execute(
            "SELECT name, summary FROM metric_summaries WHERE trial_id = ? AND group_name = ? "  # noqa: S608 - marks only
            f"AND name IN ({marks(some)})",
            (trial_id, group, *some),
        )
        found.update((str(row["name"]), json.loads(row["summary"])) for row in rows)
    return found


def _store(tx: Transaction, trial_id: int, group: str, summaries: Mapping[str, Mapping[str, Any]]) -> None:
    tx.executemany(
        "INSERT INTO metric_summaries (trial_id, group_name, name, summary) VALUES (?, ?, ?, ?) "
        "ON CONFLICT (trial_id, group_name, name) DO UPDATE SET summary = excluded.summary",
        [(trial_id, group, name, json.dumps(summary)) for name, summary in summaries.items()],
    )


def replace(tx: Transaction, trial_id: int, reports: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
    """Replace a trial's summaries by those of ``reports``, which are in batch order.

    Each report is (metric group, metric name -> value).
    """
    tx.execute("DELETE FROM metric_summaries WHERE trial_id = ?", (trial_id,))
    groups: dict[str, dict[str, dict[str, Any]]] = {}
    for group, values in reports:
        of_group = groups.setdefault(group, {})
        for name, value in values.items():
            of_group[name] = summarised(of_group.get(name), value)
    for group, summaries in groups.items():
        _store(tx, trial_id, group, summaries)
    tx.update("trials", trial_id, {"num_metric_names": sum(map(len, groups.values()))})


def as_number(value: Any) -> float | None:
    """Return a number, "NaN", "Infinity" or "-Infinity" as a float, else None."""
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        return float(value)
    return _NON_FINITE.get(value) if isinstance(value, str) else None


def plain(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics for JSON, with non-finite numbers as strings."""
    return {str(name): _plain_value(value) for name, value in metrics.items()}


def finite(value: Any) -> Any:
    """Return ``value``, or "NaN", "Infinity" or "-Infinity" for a non-finite float."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _plain_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return plain(value)
    return [_plain_value(item) for item in value] if isinstance(value, list) else finite(value)


def summarised(before: Mapping[str, Any] | None, value: Any) -> dict[str, Any]:
    """Return a metric's summary ``before``, updated with ``value``.

    ``before`` is None for the first value. Numbers have ``{count, sum, mean, min, max, last, type}``, other values ``{count,
    last, type}`` with the text of ``last`` truncated to ``MAX_LAST_CHARS``.
    """
    number = as_number(value)
    if number is None:
        kind = {str: "string", bool: "boolean", dict: "object", list: "array"}.get(type(value), "null")
        count = (before or {}).get("count", 0) + 1
        text = value if isinstance(value, str) else json.dumps(value)
        last = value if len(text) <= MAX_LAST_CHARS else f"{text[:MAX_LAST_CHARS]}…"
        return {"count": count, "last": last, "type": kind}
    last = finite(value)
    if before is None or before.get("type") != "number" or "sum" not in before:
        same = dict.fromkeys(("sum", "mean", "min", "max", "last"), last)
        return {"count": 1, **same, "type": "number"}
    count = before["count"] + 1
    total = _number(before["sum"]) + number
    low, high = _number(before["min"]), _number(before["max"])
    return {
        "count": count,
        "sum": finite(total),
        "mean": finite(total / count),
        "min": finite(number if number < low else low),
        "max": finite(number if number > high else high),
        "last": last,
        "type": "number",
    }


def _number(value: Any) -> float:
    number = as_number(value)
    return math.nan if number is None else number
