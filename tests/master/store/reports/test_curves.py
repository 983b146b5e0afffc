"""Curves have every reported number; downsampling keeps their shape."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dstrial.master.store.database import Database, Transaction
from dstrial.master.store.reports import curves
from dstrial.master.store.reports.metric_summaries import as_number, plain

NAMES = ("loss", "a.b, c", 'größe "x"')
VALUES = st.one_of(
    st.floats(),
    st.integers(-(2**70), 2**70),
    st.sampled_from([True, None, "NaN", "1.5", "a, b]", [1, 2], {"loss": 3}, math.pi, 5e-324, 0.1 + 0.2]),
)
REPORTS = st.lists(
    st.tuples(st.integers(-1, 5), st.integers(0, 1), st.dictionaries(st.sampled_from(NAMES), VALUES)),
    max_size=12,
    unique_by=lambda one: one[0],
)


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    with contextlib.closing(Database(tmp_path_factory.mktemp("curves") / "master.db")) as made:
        yield made


def store(database: Database, rows: list[tuple[int, int, int, int, str]]) -> None:
    def write(tx: Transaction) -> None:
        tx.execute("DELETE FROM metrics")
        tx.executemany(
            "INSERT INTO metrics (trial_id, group_name, run_id, steps, end_us, archived, metrics) VALUES (1, 'g', ?, ?, ?, ?, ?)",
            rows,
        )

    database.write(write)


def read(database: Database, name: str) -> list[tuple[int, int, str]]:
    with database.read() as connection:
        steps, times, values = curves.curve(connection, 1, "g", name)
    assert all(type(value) is float for value in values)
    return list(zip(steps, times, map(str, values), strict=True))


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(REPORTS)
def test_curve_equals_reading_every_report(
    database: Database, reports: list[tuple[int, int, dict[str, Any]]]
) -> None:
    stored = [(steps, archived, json.dumps(plain(one))) for steps, archived, one in reports]
    store(database, [(1, steps, 10**15 + steps, archived, text) for steps, archived, text in stored])
    for name in (*NAMES, "never"):
        expected = [
            (steps, 10**15 + steps, str(number))
            for steps, archived, text in sorted(stored)
            if steps >= 0 and not archived and (number := as_number(json.loads(text).get(name))) is not None
        ]
        assert read(database, name) == expected


SERIES = st.lists(st.floats(), max_size=300)


@given(SERIES, st.integers(1, 60))
def test_downsample_returns_at_most_max_points_sorted(ys: list[float], max_points: int) -> None:
    kept = curves.downsample(ys, max_points)
    assert kept == sorted(set(kept))
    assert len(kept) <= max_points
    assert set(kept) <= set(range(len(ys)))
    assert len(ys) > max_points or len(kept) == len(ys)


@given(SERIES, st.integers(7, 60))
def test_downsample_keeps_ends_extremes_and_nonfinite_kinds(ys: list[float], max_points: int) -> None:
    kept = curves.downsample(ys, max_points)
    there = [ys[idx] for idx in kept]
    if ys:
        assert (kept[0], kept[-1]) == (0, len(ys) - 1)
    finite = [y for y in ys if math.isfinite(y)]
    if finite:
        assert {min(finite), max(finite)} <= set(there)
    for kind in ("nan", "inf", "-inf"):
        first = next((idx for idx, y in enumerate(ys) if str(y) == kind), None)
        assert first is None or first in kept


def test_downsample_keeps_spikes_and_shape() -> None:
    ys = [math.sin(idx / 500) for idx in range(10_000)]
    ys[1234], ys[7000] = 3.0, -0.99
    kept = curves.downsample(ys, 400)
    assert {1234, 7000} <= set(kept)
    assert 380 <= len(kept) <= 400
    # Linear interpolation between the kept points stays near the series.
    for left, right in zip(kept, kept[1:], strict=False):
        for idx in set(range(left, right)) - {1234, 7000, left}:
            line = ys[left] + (ys[right] - ys[left]) * (idx - left) / (right - left)
            near_spike = any(abs(idx - spike) < 300 for spike in (1234, 7000))
            assert near_spike or abs(line - ys[idx]) < 0.1


def test_downsample_shows_nonfinite_part_as_gap() -> None:
    ys = [float(idx) for idx in range(1000)]
    ys[400:600] = [math.nan] * 200
    kept = curves.downsample(ys, 50)
    assert sum(math.isnan(ys[idx]) for idx in kept) > 3
    assert max(idx for idx in kept if idx < 400) >= 390


@pytest.mark.parametrize(("most", "kept"), [(1, [4]), (2, [0, 4]), (4, [0, 1, 2, 4])])
def test_downsample_to_few_points_keeps_last_and_first(most: int, kept: list[int]) -> None:
    assert curves.downsample([1.0, 9.0, -9.0, 2.0, 3.0], most) == kept


def test_downsample_to_zero_points_raises() -> None:
    with pytest.raises(ValueError, match="expected at least 1"):
        curves.downsample([1.0, 2.0], 0)


INSTRUMENT = 'forward "ms"'


def store_ranks(database: Database, rows: list[tuple[int, int, int]], text: str = "") -> None:
    """Replace the telemetry by (run, batch, archived); rank r has the value batch + r / 4."""

    def report(step: int) -> str:
        ranks = {INSTRUMENT: [step, step + 0.25], "other": ["NaN"] * 2}
        return text or json.dumps({"other": 1.5, "ranks": ranks})

    def write(tx: Transaction) -> None:
        tx.execute("DELETE FROM metrics")
        tx.executemany(
            "INSERT INTO metrics (trial_id, group_name, run_id, steps, archived, metrics, end_us) "
            "VALUES (1, 'telemetry', ?, ?, ?, ?, 7)",
            [(run, step, archived, report(step)) for run, step, archived in rows],
        )

    database.write(write)


def history(database: Database) -> list[int]:
    """Return the batches of the instrument's values; check times and values."""
    with database.read() as connection:
        steps, times, values = curves.by_rank(connection, 1, INSTRUMENT)
    assert times == [7] * len(steps)
    assert values == [[step, step + 0.25] for step in steps]
    return steps


def test_history_of_few_reports_omits_only_archived(database: Database) -> None:
    for number in (0, 1, 2, curves.MAX_REPORTS):
        store_ranks(database, [(1, step, int(step % 5 == 3)) for step in range(number)])
        assert history(database) == [step for step in range(number) if step % 5 != 3]


def test_history_of_many_reports_is_sampled_evenly(database: Database) -> None:
    number = 3 * curves.MAX_REPORTS + 2
    store_ranks(database, [(1, step, 0) for step in range(number)])
    assert history(database) == [*range(0, number, 4), number - 1]


def test_history_after_restart_spans_unarchived_reports(database: Database) -> None:
    first = [(1, step, int(step > 500)) for step in range(2 * curves.MAX_REPORTS)]
    store_ranks(database, [*first, *((2, step, 0) for step in range(501, 600))])
    steps = history(database)
    assert (steps[0], steps[-1]) == (0, 599)
    assert len(steps) >= 600 // 3


@pytest.mark.parametrize("text", ['{"ranks": {"forward": "text"}}', '{"ranks": "damaged"}', "{}"])
def test_history_of_unreported_metric_is_empty(database: Database, text: str) -> None:
    store_ranks(database, [(1, 1, 0)], text)
    assert history(database) == []
