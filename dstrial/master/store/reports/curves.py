"""Read all values of one trial metric for a plot, and downsample curves.

SQLite concatenates the values, as creating objects for a million rows would hold the GIL for seconds.
"""

from __future__ import annotations

import bisect
import re
import sqlite3
from collections.abc import Sequence
from itertools import compress
from typing import Any

import orjson

from dstrial.master.store.reports.metric_summaries import as_number

# Names that SQLite 3.40 finds by JSON path: it compares a path's label with the raw JSON text, without unescaping.
_PLAIN_NAME = re.compile(r"[ !#-\[\]-~]+")
_AT_ONCE = 50_000  # reports per query
# The operator -> returns a number's original text; json_extract() rounds to 15 digits.
_HAS_ARROW = sqlite3.sqlite_version_info >= (3, 38)
_WHERE = "m.trial_id = ? AND m.group_name = ? AND m.steps >= 0 AND m.steps > ? AND m.archived = 0"
_PACKED = f"""
SELECT group_concat(steps), group_concat(end_us), group_concat(value) FROM (
    SELECT m.steps, m.end_us, coalesce(m.metrics -> ?, 'null') AS value FROM metrics m
    WHERE {_WHERE} ORDER BY m.steps, m.run_id LIMIT {_AT_ONCE})
"""  # noqa: S608 - constants


def curve(
    connection: sqlite3.Connection, trial_id: int, group: str, name: str, *, after: int = -1
) -> tuple[list[int], list[int], list[float]]:
    """Return all values of a metric as three lists: batches, times (us), values.

    The lists are sorted by batch and start after batch ``after``. Skipped are reports without a batch, archived reports (a later
    run has repeated their batches), and values that are not numbers (NaN and infinity count as numbers).
    """
    path = _path_of(name)
    if path is None or not _HAS_ARROW:
        return _by_row(connection, trial_id, group, name, after)
    steps: list[int] = []
    times: list[int] = []
    values: list[float] = []
    while True:
        found = connection.execute(_PACKED, (path, trial_id, group, after)).fetchone()
        part = [orjson.loads(f"[{text or ''}]") for text in found]
        num_found = len(part[0])
        if num_found == _AT_ONCE:
            # The limit may split the reports of the last batch: read that batch again in the next part.
            end = bisect.bisect_left(part[0], part[0][-1]) or num_found
            part = [column[:end] for column in part]
        more = _numbers(part)
        steps += more[0]
        times += more[1]
        values += more[2]
        if num_found < _AT_ONCE:
            return steps, times, values
        after = part[0][-1]


def _numbers(columns: list[list[Any]]) -> list[list[Any]]:
    steps, times, given = columns
    if set(map(type, given)) <= {float}:
        return columns
    values = [as_number(value) for value in given]
    are_there = [value is not None for value in values]
    return [list(compress(column, are_there)) for column in (steps, times, values)]


def _by_row(
    connection: sqlite3.Connection, trial_id: int, group: str, name: str, after: int
) -> tuple[list[int], list[int], list[float]]:
    value, parameters = _value_of(name)
    cursor = connection.execute(
        f"SELECT m.steps, m.end_us, {value} FROM metrics m WHERE {_WHERE} ORDER BY m.steps, m.run_id",  # noqa: S608 - constants and marks
        (*parameters, trial_id, group, after),
    )
    cursor.row_factory = None  # tuples take half the time of rows
    columns = list(map(list, zip(*cursor, strict=True))) or [[], [], []]
    steps, times, values = _numbers(columns)
    return steps, times, values


def _path_of(name: str) -> str | None:
    """Return the JSON path of a metric; None if the metric's name needs escapes."""
    return f'$."{name}"' if _PLAIN_NAME.fullmatch(name) else None


def _value_of(name: str) -> tuple[str, tuple[str, ...]]:
    """Return an SQL expression for a metric's value in row ``m``, and SQL parameters."""
    path = _path_of(name)
    if path is not None:
        kinds = "('integer', 'real', 'text')"
        value = f"CASE WHEN json_type(m.metrics, ?) IN {kinds} THEN json_extract(m.metrics, ?) END"
        return value, (path, path)
    # SQLite's JSON functions end strings at a NUL byte, so names with one are never found.
    return (
        "(SELECT j.value FROM json_each(m.metrics) j WHERE j.key = ? AND j.type IN ('integer', 'real', 'text'))",
        (name,),
    )


def downsample(ys: Sequence[float], max_points: int) -> list[int]:
    """Return the sorted indices of at most ``max_points`` points to keep.

    Splits the curve into equal parts, and keeps the minimum and maximum of each part, the first and last point, and the first
    NaN, inf and -inf. A part without finite values keeps one point, which appears as a gap.
    """
    if max_points < 1:
        raise ValueError(f"max_points is {max_points}; expected at least 1. Ask for more.")
    if len(ys) <= max_points:
        return list(range(len(ys)))
    always = dict.fromkeys([len(ys) - 1, 0])
    if sum(ys) - sum(ys) != 0:  # also if only the sum overflows
        kinds: dict[str, int] = {}
        for idx, y in enumerate(ys):
            if y - y != 0:
                kinds.setdefault(str(y), idx)
        always |= dict.fromkeys(kinds.values())
    kept = set(list(always)[:max_points])
    num_parts = (max_points - len(kept)) // 2
    for part in range(num_parts):
        places: Sequence[int] = range(part * len(ys) // num_parts, (part + 1) * len(ys) // num_parts)
        finite = [idx for idx in places if ys[idx] - ys[idx] == 0] or places[:1]
        kept |= {min(finite, key=ys.__getitem__), max(finite, key=ys.__getitem__)}
    return sorted(kept)
