"""SQLite finds the values of a metric whatever its name and its neighbours are."""

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
from dstrial.master.store.reports import series
from dstrial.master.store.reports.metric_values import as_number, plain

ALL = series.Window()
VALUES = st.one_of(
    st.floats(), st.integers(-(2**53), 2**53), st.booleans(), st.none(), st.text(max_size=3), st.just([1])
)


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    with contextlib.closing(Database(tmp_path_factory.mktemp("series") / "master.db")) as made:
        yield made


def store(database: Database, reports: list[dict[str, Any]]) -> None:
    def write(tx: Transaction) -> None:
        tx.execute("DELETE FROM metrics")
        tx.executemany(
            "INSERT INTO metrics (trial_id, run_id, group_name, steps, end_us, metrics) VALUES (1, 1, 'g', ?, 7, ?)",
            [(steps, json.dumps(plain(one))) for steps, one in enumerate(reports)],
        )

    database.write(write)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
# Texts of SQLite's JSON functions end at a zero byte: a name with one has no series. Half a surrogate pair, which UTF-8 does not
# have, comes neither in a body (tests/master/http/test_router.py) nor in a query.
@given(
    st.lists(
        st.dictionaries(
            st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=6), VALUES, max_size=4
        ),
        max_size=6,
    )
)
def test_a_series_is_what_reading_every_report_would_give(
    database: Database, reports: list[dict[str, Any]]
) -> None:
    store(database, reports)
    for name in {name for one in reports for name in one} | {"never"}:
        stored = [json.loads(json.dumps(plain(one))) for one in reports]
        expected = [
            (steps, str(number))
            for steps, one in enumerate(stored)
            if (number := as_number(one.get(name))) is not None
        ]
        with database.read() as connection:
            points = series.points(connection, 1, "g", [name], 2000, ALL)
            batches = series.batches(connection, [1], "g", name, 0)
        assert [(point.steps, str(point.values[name])) for point in points] == expected
        assert {steps for steps, _ in expected} <= batches


NAMES = ["loss", "a b", 'say "x"', "back\\slash", "a.b[0]", "größe", "tab\t", "'; DROP TABLE metrics; --", ""]


@pytest.mark.parametrize("name", NAMES)
def test_a_metric_of_any_name_is_found_beside_others(database: Database, name: str) -> None:
    store(database, [{name: 1.5, "other": 2, "epoch": 0.25}, {"other": 3}, {name: math.inf}])
    with database.read() as connection:
        points = series.points(connection, 1, "g", [name, "other"], 2000, ALL)
    assert [(one.steps, one.epoch, one.values) for one in points] == [
        (0, 0.25, {name: 1.5, "other": 2.0}),
        (1, None, {"other": 3.0}),
        (2, None, {name: math.inf}),
    ]


def test_each_series_is_reduced_by_itself(database: Database) -> None:
    store(database, [{"up": idx, "spiky": 99 if idx == 321 else 0} for idx in range(1000)])
    with database.read() as connection:
        points = series.points(connection, 1, "g", ["up", "spiky"], 20, ALL)
    of_up = [one.steps for one in points if "up" in one.values]
    of_spiky = [one.steps for one in points if "spiky" in one.values]
    assert len(of_up) <= 20
    assert len(of_spiky) <= 20
    assert 321 in of_spiky
    assert [one.steps for one in points] == sorted({*of_up, *of_spiky})
