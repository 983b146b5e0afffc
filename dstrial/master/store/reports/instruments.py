"""Telemetry of a trial's ranks: the newest report, and curves of single metrics."""

from __future__ import annotations

import dataclasses
import json
import sqlite3
from typing import Any

from dstrial.master.store.database import fetch_column
from dstrial.master.store.reports.metric_summaries import as_number

# dstrial.telemetry.samples writes these names. They are repeated here, as the master must not import training code.
GROUP = "telemetry"
_RANKS = "ranks"
MAX_REPORTS = 500  # per curve
_WHERE = "trial_id = ? AND group_name = ? AND steps >= 0 AND archived = 0"


@dataclasses.dataclass(frozen=True, slots=True)
class Instruments:
    """A telemetry report of a trial's ranks."""

    steps: int  # batches completed
    end_us: int
    run_id: int
    values: dict[str, Any]  # metric name -> number aggregated over all ranks, or a string
    ranks: dict[str, list[float | None]]  # metric name -> number per rank, None if missing


def newest(connection: sqlite3.Connection, trial_id: int) -> Instruments | None:
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

    ``values[i][rank]`` is None if missing. If there are more than ``MAX_REPORTS`` reports, an evenly spaced subset with the first
    and the last report is returned.
    """
    steps: list[int] = []
    times: list[int] = []
    values: list[list[float | None]] = []
    rows = connection.execute(
        "SELECT m.steps, m.end_us, j.value AS value FROM metrics m CROSS JOIN json_each(m.metrics, ?) j ON j.key = ? "
        "WHERE m.id IN (SELECT value FROM json_each(?)) AND m.archived = 0 ORDER BY m.steps, m.id",
        (f"$.{_RANKS}", name, json.dumps(_chosen(connection, trial_id))),
    )
    for row in rows:
        given = json.loads(row["value"]) if isinstance(row["value"], str) else None
        if isinstance(given, list):
            steps.append(row["steps"])
            times.append(row["end_us"])
            values.append([as_number(value) for value in given])
    return steps, times, values


def _chosen(connection: sqlite3.Connection, trial_id: int) -> list[int]:
    """Return ids of the reports that ``by_rank`` reads, at most ``MAX_REPORTS`` + 1."""
    newest_id = f"SELECT id FROM metrics WHERE {_WHERE} ORDER BY steps DESC, run_id DESC LIMIT 1"  # noqa: S608 - constants
    # Without a condition on ``archived``, this is an index-only query; ``by_rank`` skips archived reports.
    spaced = (
        "SELECT id FROM (SELECT id, ROW_NUMBER() OVER (ORDER BY steps, run_id) - 1 AS place, COUNT(*) OVER () AS number "
        "FROM metrics WHERE trial_id = ? AND group_name = ? AND steps >= 0) WHERE place % ((number - 1) / ? + 1) = 0"
    )
    return [
        *fetch_column(int, connection, newest_id, (trial_id, GROUP)),
        *fetch_column(int, connection, spaced, (trial_id, GROUP, MAX_REPORTS)),
    ]
