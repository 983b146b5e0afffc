"""What the ranks of a trial measured of themselves, as it reported that.

There are the newest report, and curves by rank.
"""

from __future__ import annotations

import dataclasses
import json
import sqlite3
from typing import Any

from dstrial.master.store.reports.metric_values import as_number

# Written by dstrial.telemetry.samples, whose words these are; the master imports nothing that trains.
GROUP = "telemetry"
_RANKS = "ranks"
_WHERE = "trial_id = ? AND group_name = ? AND steps >= 0 AND archived = 0"


@dataclasses.dataclass(frozen=True, slots=True)
class Instruments:
    """A report of instruments.

    Attributes:
        steps: finished batches of the trial.
        end_us: when it was reported.
        run_id: which run of the trial it was.
        values: instrument -> its number over all ranks, or a word.
        ranks: instrument -> a number for each rank, None where that has none.
    """

    steps: int
    end_us: int
    run_id: int
    values: dict[str, Any]
    ranks: dict[str, list[float | None]]


def newest(connection: sqlite3.Connection, trial_id: int) -> Instruments | None:
    """Return the newest report of a trial, None without one."""
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
    """Return the ranks' values of an instrument, by batch.

    That is batches, times in microseconds, and for each the values.
    """
    steps: list[int] = []
    times: list[int] = []
    values: list[list[float | None]] = []
    rows = connection.execute(
        "SELECT m.steps, m.end_us, j.value AS value FROM metrics m CROSS JOIN json_each(m.metrics, ?) j ON j.key = ? "  # noqa: S608 - constants
        f"WHERE {_WHERE} ORDER BY m.steps, m.id",
        (f"$.{_RANKS}", name, trial_id, GROUP),
    )
    for row in rows:
        given = json.loads(row["value"]) if isinstance(row["value"], str) else None
        if isinstance(given, list):
            steps.append(row["steps"])
            times.append(row["end_us"])
            values.append([as_number(value) for value in given])
    return steps, times, values
