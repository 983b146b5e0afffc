"""Rungs and brackets of adaptive ASHA, with values from Determined's tests."""

from __future__ import annotations

from typing import Any

import pytest

from dstrial.errors import SearchError
from dstrial.search import preview
from dstrial.search.halving import Bracket, bracket_concurrency, bracket_trials, brackets, rung_units


def searcher(**changes: Any) -> dict[str, Any]:
    return {
        "name": "adaptive_asha",
        "metric": "loss",
        "smaller_is_better": True,
        "max_trials": 10,
        "max_rungs": 5,
        "bracket_rungs": [],
        "mode": "standard",
        "divisor": 4,
        "max_concurrent_trials": 16,
        "max_time": 100,
        "time_metric": "batches",
        **changes,
    }


@pytest.mark.parametrize(
    ("num_rungs", "divisor", "max_time", "units"),
    [(3, 3, 9, [1, 3, 9]), (4, 2, 10, [1, 2, 5, 10]), (3, 3, 900, [100, 300, 900])],
)
def test_rung_units_are_divisor_apart(num_rungs: int, divisor: int, max_time: int, units: list[int]) -> None:
    assert rung_units(num_rungs, divisor, max_time) == units


@pytest.mark.parametrize(
    ("max_trials", "divisor", "rungs", "trials"),
    [
        (20, 3, [3, 2, 1], [12, 5, 3]),
        (50, 3, [4, 3], [35, 15]),
        (50, 4, [3, 2], [37, 13]),
        (100, 4, [4, 3, 2], [70, 22, 8]),
    ],
)
def test_bracket_trials_are_weighted_by_cost(
    max_trials: int, divisor: int, rungs: list[int], trials: list[int]
) -> None:
    assert bracket_trials(max_trials, divisor, rungs) == trials


@pytest.mark.parametrize(
    ("max_concurrent", "divisor", "trials", "concurrency"),
    [(0, 3, [9, 3, 1], [3, 3, 3]), (11, 3, [9, 3, 1], [4, 4, 3]), (0, 4, [40, 10], [10, 10])],
)
def test_bracket_concurrency_is_divided_evenly(
    max_concurrent: int, divisor: int, trials: list[int], concurrency: list[int]
) -> None:
    assert bracket_concurrency(max_concurrent, divisor, trials) == concurrency


def test_brackets_by_mode() -> None:
    assert brackets(searcher(max_concurrent_trials=2)) == [Bracket(2, 7, 1), Bracket(1, 3, 1)]
    conservative = searcher(mode="conservative", divisor=3, max_concurrent_trials=5)
    assert brackets(conservative) == [Bracket(3, 7, 2), Bracket(2, 2, 2), Bracket(1, 1, 1)]


@pytest.mark.parametrize("rungs", [[0], [-3], ["a"], [1.5], [True]])
def test_bracket_rungs_must_be_positive_integers(rungs: list[Any]) -> None:
    with pytest.raises(SearchError, match=r"bracket_rungs has .*; expected integers of at least 1"):
        brackets(searcher(bracket_rungs=rungs))


@pytest.mark.parametrize("divisor", [4, 4.0, 1e308, float("inf")])
def test_overflowing_divisor_powers_leave_first_rung_at_minimum(divisor: float) -> None:
    assert rung_units(1000, divisor, 100)[-1] == 100
    assert rung_units(1000, divisor, 100)[0] == 1
    config = searcher(bracket_rungs=[2000, 1], divisor=divisor, max_concurrent_trials=0)
    assert [bracket.max_trials for bracket in brackets(config)] == [10, 1]
    assert sum(trials.count for trials in preview({"hyperparameters": {}, "searcher": config}).trials) == 11


@pytest.mark.parametrize(
    ("changes", "stops"),
    [
        ({"max_rungs": 10, "divisor": 3, "max_time": 900}, [(5, 100), (3, 300), (2, 900)]),
        (
            {"name": "async_halving", "num_rungs": 3, "max_trials": 9, "divisor": 3, "max_time": 9},
            [(6, 1), (2, 3), (1, 9)],
        ),
    ],
)
def test_preview_sums_stops_of_brackets(changes: dict[str, Any], stops: list[tuple[int, int]]) -> None:
    summary = preview({"hyperparameters": {}, "searcher": searcher(**changes)})

    assert [(trials.count, trials.value) for trials in summary.trials] == stops
