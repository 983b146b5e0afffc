"""Series of metrics over the batches of a trial.

They are reduced to the points that are drawn. SQLite takes the values out of the reports: to make objects of all the other
metrics in each report would hold up every request meanwhile, and a report may have ten thousand.
"""

from __future__ import annotations

import dataclasses
import re
import sqlite3
from collections.abc import Callable, Sequence
from typing import Any

from dstrial.master.store.reports.downsample import downsample
from dstrial.master.store.reports.metric_values import as_number

MAX_POINTS = 2000
"""Most points of one series."""

MAX_NAMES = 100
"""Most metrics of a group in one question."""

_LAST_BATCH = 2**62
# SQLite 3.40 compares the label of a path with the JSON text as it stands, escapes and all.
_PLAIN_NAME = re.compile(r"[ !#-\[\]-~]+")


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """What was reported at one batch.

    Attributes:
        steps: batches trained.
        end_us: when it was reported.
        epoch: metric of this name in the same report; None without one.
        values: metric -> value, of those that are drawn here; NaN and infinities are numbers.
    """

    steps: int
    end_us: int
    epoch: float | None
    values: dict[str, float]


@dataclasses.dataclass(frozen=True, slots=True)
class Window:
    """Which reports are wanted.

    Attributes:
        first: batch of the first one.
        last: batch of the last one; None for no end.
        filter_name: metric that ``is_wanted`` asks for besides; None for none.
        is_wanted: given the point's batch, time in microseconds, epoch and the value of ``filter_name``.
    """

    first: int = 0
    last: int | None = None
    filter_name: str | None = None
    is_wanted: Callable[[int, int, float | None, float | None], bool] | None = None


def points(
    connection: sqlite3.Connection,
    trial_id: int,
    group: str,
    names: Sequence[str],
    max_points: int,
    window: Window,
) -> list[Point]:
    """Return the series of some metrics of a trial, by batch.

    Each has at most ``max_points``. A point has the values of those series that it is a point of. Archived reports and those of
    no batch are left out.
    """
    rows = _rows(connection, trial_id, group, names, window)
    steps = [row[0] for row in rows]
    kept: dict[int, dict[str, float]] = {}
    for column, name in enumerate(names, start=3):
        places, values = [], []
        for place, row in enumerate(rows):
            value = row[column]
            if type(value) is not float:
                value = as_number(value)
            if value is not None:
                places.append(place)
                values.append(value)
        for idx in downsample([steps[place] for place in places], values, max_points):
            kept.setdefault(places[idx], {})[name] = values[idx]
    return [
        Point(rows[place][0], rows[place][1], as_number(rows[place][2]), kept[place])
        for place in sorted(kept)
    ]


def _rows(
    connection: sqlite3.Connection, trial_id: int, group: str, names: Sequence[str], window: Window
) -> list[tuple[Any, ...]]:
    """Return (batch, time, epoch, value of each name) by batch."""
    asked = ["epoch", *names]
    if window.filter_name is not None:
        asked.append(window.filter_name)
    columns, parameters = zip(*(value_of(name) for name in asked), strict=True)
    last = _LAST_BATCH if window.last is None else window.last
    cursor = connection.execute(
        f"SELECT m.steps, m.end_us, {', '.join(columns)} FROM metrics m "  # noqa: S608 - expressions with marks
        "WHERE m.trial_id = ? AND m.group_name = ? AND m.steps >= 0 AND m.steps BETWEEN ? AND ? AND m.archived = 0 "
        "ORDER BY m.steps, m.run_id",
        (*(one for pair in parameters for one in pair), trial_id, group, window.first, last),
    )
    cursor.row_factory = None  # Tuples are enough, and made in half the time.
    is_wanted = window.is_wanted
    if is_wanted is None:
        return cursor.fetchall()
    has_name = window.filter_name is not None
    return [
        row
        for row in cursor
        if is_wanted(row[0], row[1], as_number(row[2]), as_number(row[-1]) if has_name else None)
    ]


def path_of(name: str) -> str | None:
    """Return the JSON path of a report's metric; None where SQLite finds none."""
    return f'$."{name}"' if _PLAIN_NAME.fullmatch(name) else None


def value_of(name: str) -> tuple[str, tuple[str, ...]]:
    """Return an SQL expression for a metric of a report, and its parameters.

    The report is ``m``, and the metric may be a number. It finds nothing of a name with a zero byte, at which texts of SQLite's
    JSON functions end.
    """
    path = path_of(name)
    if path is not None:
        kinds = "('integer', 'real', 'text')"
        value = f"CASE WHEN json_type(m.metrics, ?) IN {kinds} THEN json_extract(m.metrics, ?) END"
        return value, (path, path)
    return (
        "(SELECT j.value FROM json_each(m.metrics) j WHERE j.key = ? AND j.type IN ('integer', 'real', 'text'))",
        (name,),
    )


def last_report_id(connection: sqlite3.Connection) -> int:
    """Return the id of the latest report of any trial, 0 without one."""
    (found,) = connection.execute("SELECT COALESCE(MAX(id), 0) FROM metrics").fetchone()
    return int(found)


def batches(
    connection: sqlite3.Connection, trial_ids: Sequence[int], group: str, name: str, after_id: int
) -> set[int]:
    """Return at which batches some trials reported a metric.

    Of reports after ``after_id``.
    """
    value, parameters = value_of(name)
    marks = ", ".join("?" * len(trial_ids))
    rows = connection.execute(
        f"SELECT DISTINCT m.steps FROM metrics m WHERE m.trial_id IN ({marks}) AND m.group_name = ? "  # noqa: S608 - marks only
        f"AND m.steps >= 0 AND m.archived = 0 AND m.id > ? AND {value} IS NOT NULL",
        (*trial_ids, group, after_id, *parameters),
    )
    return {int(row[0]) for row in rows}


def nearest(
    connection: sqlite3.Connection,
    trial_ids: Sequence[int],
    group: str,
    name: str,
    steps: int,
    margin: int,
) -> dict[int, tuple[int, float]]:
    """Return each trial's (batch, value) of a metric that is nearest to a batch.

    It is at most ``margin`` from it.
    """
    value, parameters = value_of(name)
    marks = ", ".join("?" * len(trial_ids))
    rows = connection.execute(
        f"SELECT m.trial_id, m.steps, {value} AS value FROM metrics m WHERE m.trial_id IN ({marks}) "  # noqa: S608 - marks only
        "AND m.group_name = ? AND m.steps >= 0 AND m.steps BETWEEN ? AND ? AND m.archived = 0 ORDER BY m.steps, m.run_id",
        (*parameters, *trial_ids, group, steps - margin, steps + margin),
    )
    found: dict[int, tuple[int, float]] = {}
    for row in rows:
        number = as_number(row["value"])
        if number is None:
            continue
        trial_id, at = int(row["trial_id"]), int(row["steps"])
        before = found.get(trial_id)
        if before is None or abs(at - steps) < abs(before[0] - steps):
            found[trial_id] = (at, number)
    return found


def best_trials(
    connection: sqlite3.Connection,
    experiment_id: int,
    group: str,
    name: str,
    limit: int,
    *,
    smaller_is_better: bool,
    longest_first: bool,
) -> list[int]:
    """Return the trials of an experiment that are best by a metric, the best first.

    Args:
        connection: what to read from.
        experiment_id: whose trials.
        group: of the metric.
        name: of the metric.
        limit: how many at most.
        smaller_is_better: of the metric.
        longest_first: whether those that have trained longest are the best, as in a search that stops the others.
    """
    of_metric, order = ("min", "ASC") if smaller_is_better else ("max", "DESC")
    length = "t.total_batches DESC, " if longest_first else ""
    rows = connection.execute(
        f"SELECT id FROM (SELECT t.id, t.total_batches, json_extract(s.summary, '$.{of_metric}') AS best "  # noqa: S608 - constants
        "FROM trials t JOIN metric_summaries s ON s.trial_id = t.id "
        "WHERE t.experiment_id = ? AND s.group_name = ? AND s.name = ?) t "
        f"WHERE best IS NOT NULL ORDER BY typeof(best) = 'text', {length}best {order}, id LIMIT ?",
        (experiment_id, group, name, limit),
    )
    return [int(row["id"]) for row in rows]
