"""Downsampled history of a telemetry metric by rank."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Iterator, Sequence

import pytest

from dstrial.master.store.database import Database, Transaction
from dstrial.master.store.reports import instruments

NAME = 'forward "ms"'
Row = tuple[int, int, int, str]


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    with contextlib.closing(Database(tmp_path_factory.mktemp("instruments") / "master.db")) as made:
        yield made


def report(step: int, num_ranks: int) -> str:
    """Return a telemetry report in which rank r has the value step + r / 1024."""
    ranks = {NAME: [step + rank / 1024 for rank in range(num_ranks)], "other": ["NaN"] * num_ranks}
    return json.dumps({"other": 1.5, "ranks": ranks})


def store(database: Database, rows: Sequence[Row]) -> None:
    """Replace all telemetry reports by rows of (run, batch, archived, JSON)."""

    def write(tx: Transaction) -> None:
        tx.execute("DELETE FROM metrics")
        tx.executemany(
            "INSERT INTO metrics (trial_id, group_name, run_id, steps, archived, metrics, end_us) "
            "VALUES (1, 'telemetry', ?, ?, ?, ?, 7)",
            rows,
        )

    database.write(write)


def history(database: Database) -> tuple[list[int], list[list[float | None]]]:
    with database.read() as connection:
        steps, times, values = instruments.by_rank(connection, 1, NAME)
    assert times == [7] * len(steps)
    return steps, values


@pytest.mark.parametrize("num_reports", [0, 1, 2, instruments.MAX_REPORTS])
def test_history_of_few_reports_omits_only_archived(database: Database, num_reports: int) -> None:
    rows = [(1, step, int(step % 5 == 3), report(step, 3)) for step in range(num_reports)]
    random.Random(num_reports).shuffle(rows)
    store(database, rows)
    there = [step for step in range(num_reports) if step % 5 != 3]
    assert history(database) == (there, [[step, step + 1 / 1024, step + 2 / 1024] for step in there])


def test_history_of_many_reports_is_sampled_evenly(database: Database) -> None:
    num_reports = 3 * instruments.MAX_REPORTS + 2
    # Reports outside the sample are invalid JSON: reading one of them would raise.
    rows = [(1, step, 0, report(step, 2) if step % 4 == 0 else "broken") for step in range(num_reports)]
    rows[-1] = (1, num_reports - 1, 0, report(num_reports - 1, 2))
    store(database, rows)
    steps, values = history(database)
    assert steps == [*range(0, num_reports, 4), num_reports - 1]
    assert values == [[step, step + 1 / 1024] for step in steps]
    assert len(steps) <= instruments.MAX_REPORTS


def test_history_after_restart_spans_unarchived_reports(database: Database) -> None:
    num_reports = 2 * instruments.MAX_REPORTS
    first = [(1, step, int(step > 500), report(step, 2)) for step in range(num_reports)]
    again = [(2, step, 0, report(step, 2)) for step in range(501, 600)]
    store(database, first + again)
    steps, _ = history(database)
    assert (steps[0], steps[-1]) == (0, 599)
    # The sample is taken from all reports; the archived ones in it are then skipped.
    assert len(steps) >= 600 // 3


def test_history_of_unreported_metric_is_empty(database: Database) -> None:
    store(
        database,
        [(1, 1, 0, '{"ranks": {"forward": "text"}}'), (1, 2, 0, '{"ranks": "damaged"}'), (1, 3, 0, "{}")],
    )
    assert history(database) == ([], [])
