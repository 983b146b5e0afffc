"""Curves of metrics and of telemetry, and their downsampling, for plots."""

from __future__ import annotations

import dataclasses
import json
import sqlite3
from collections.abc import Sequence
from typing import Any

from dstrial.master.store.database import fetch_column
from dstrial.master.store.reports.metric_summaries import as_number

# dstrial.telemetry.samples writes these names. They are repeated here, as the master must not import training code.
GROUP = "telemetry"
_RANKS = "ranks"
MAX_REPORTS = 500  # per curve
_WHERE = "trial_id = ? AND group_name = ? AND steps >= 0 AND archived = 0"


def curve(
    connection: sqlite3.Connection, trial_id: int, group: str, name: str
) -> tuple[list[int], list[int], list[float]]:
    """Return all values of a metric as three lists: batches, times (us), values.

    The lists are sorted by batch. Reports without a batch are skipped. Archived reports, whose batches a later run repeats,
    are skipped too. So are values that are not numbers; NaN and infinity count as numbers.
    """
    cursor = connection.execute(
        f"SELECT steps, end_us, j.value FROM metrics m CROSS JOIN json_each(m.metrics) j WHERE {_WHERE} "  # noqa: S608 - constants
        "AND j.key = ? AND j.type IN ('integer', 'real', 'text') ORDER BY steps, run_id",
        (trial_id, group, name),
    )
    cursor.row_factory = None  # tuples take half the time of rows
    found = [
        (steps, end_us, number) for steps, end_us, value in cursor if (number := as_number(value)) is not None
    ]
    return [one[0] for one in found], [one[1] for one in found], [one[2] for one in found]


def downsample(ys: Sequence[float], max_points: int) -> list[int]:
    """Return sorted indices of up to ``max_points`` points that show a curve's shape.

    ``ys`` are the values of the curve. If there are too many, the curve is split into equal parts. The result then has the
    first and last point, the first NaN, inf and -inf, and the minimum and maximum of each part. A part without finite values
    has one point, so that plots show a gap.

    Raises:
        ValueError: ``max_points`` is less than 1.
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


@dataclasses.dataclass(frozen=True, slots=True)
class Instruments:
    """A telemetry report of a trial's ranks."""

    steps: int  # batches completed
    end_us: int
    run_id: int
    values: dict[str, Any]  # metric name -> number aggregated over all ranks, or a string
    ranks: dict[str, list[float | None]]  # metric name -> number per rank, None if missing


def newest(connection: sqlite3.Connection, trial_id: int) -> Instruments | None:
    """Return a trial's telemetry report of the latest batch, or None."""
    row = connection.execute(
        f"SELECT steps, end_us, run_id, metrics FROM metrics WHERE {_WHERE} ORDER BY steps DESC, id DESC LIMIT 1",  # noqa: S608 - constants
        (trial_id, GROUP),
    ).fetchone()
    if row is None:
        return None
    found = json.loads(row["metrics"])
    by_rank = found.pop(_RANKS, None)
    ranks = {
        str(name): [as_number(value) for value in values]
        for name, values in (by_rank.items() if isinstance(by_rank, dict) else ())
        if isinstance(values, list)
    }
    values = {name: value for name, value in found.items() if not isinstance(value, (dict, list))}
    return Instruments(row["steps"], row["end_us"], row["run_id"], values, ranks)


def by_rank(
    connection: sqlite3.Connection, trial_id: int, name: str
) -> tuple[list[int], list[int], list[list[float | None]]]:
    """Return a telemetry metric as three lists: batches, times (us), values by rank.

    The third list has one list per report, with one value per rank; None if missing. If there are more than ``MAX_REPORTS``
    reports, the lists contain an evenly spaced subset, with the first and the last report.
    """
    steps: list[int] = []
    times: list[int] = []
    values: list[list[float | None]] = []
    # Without a condition on ``archived``, this query reads only the index.
    all_ids = (
        "SELECT id FROM metrics WHERE trial_id = ? AND group_name = ? AND steps >= 0 ORDER BY steps, run_id"
    )
    newest_id = f"SELECT id FROM metrics WHERE {_WHERE} ORDER BY steps DESC, run_id DESC LIMIT 1"  # noqa: S608 - constants
    ids = fetch_column(int, connection, all_ids, (trial_id, GROUP))
    chosen = ids[:: max(len(ids) - 1, 0) // MAX_REPORTS + 1]
    chosen += fetch_column(int, connection, newest_id, (trial_id, GROUP))
    rows = connection.execute(
        "SELECT m.steps, m.end_us, j.value AS value FROM metrics m CROSS JOIN json_each(m.metrics, ?) j ON j.key = ? "
        "WHERE m.id IN (SELECT value FROM json_each(?)) AND m.archived = 0 ORDER BY m.steps, m.id",
        (f"$.{_RANKS}", name, json.dumps(chosen)),
    )
    for row in rows:
        given = json.loads(row["value"]) if isinstance(row["value"], str) else None
        if isinstance(given, list):
            steps.append(row["steps"])
            times.append(row["end_us"])
            values.append([as_number(value) for value in given])
    return steps, times, values
