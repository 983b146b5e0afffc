"""Rungs of successive-halving searches, from snapshots of real searchers."""

from __future__ import annotations

from typing import Any

import pytest

from dstrial.master.web.experiment_tabs import rungs_of
from dstrial.search import Create, ExitReason, Searcher, Stop

SEARCHER = {
    "name": "async_halving",
    "metric": "loss",
    "smaller_is_better": True,
    "time_metric": "batches",
    "max_time": 16,
    "num_rungs": 2,
    "divisor": 4.0,
    "max_trials": 4,
    "max_concurrent_trials": 4,
}
CONFIG = {"hyperparameters": {"lr": {"type": "double", "minval": 0.0, "maxval": 1.0}}, "searcher": SEARCHER}


def started(searcher: dict[str, Any] = SEARCHER) -> tuple[Searcher, list[str]]:
    search = Searcher.new({**CONFIG, "searcher": searcher}, 0)
    return search, [action.request_id for action in search.initial_trials() if isinstance(action, Create)]


def shown(search: Searcher, ids: list[str], searcher: dict[str, Any] = SEARCHER) -> list[dict[str, Any]]:
    state = search.snapshot()
    trials = {request_id: number for number, request_id in enumerate(ids, 1)}
    return rungs_of(searcher, state["method"], frozenset(state["closed"]), trials)


def test_rung_outcomes_cover_every_trial_state() -> None:
    search, (a, b, c, d) = started()
    search.validation_completed(a, {"loss": 0.1, "batches": 4})
    stops = search.validation_completed(b, {"loss": 0.5, "batches": 4})
    assert [type(action) for action in stops] == [Stop]
    search.trial_exited_early(c, ExitReason.ERRORED)
    search.trial_exited(c)
    (bracket,) = shown(search, [a, b, c, d])
    low, top = bracket["rungs"]
    assert [low["units"], top["units"]] == [4, 16]
    assert low["entries"] == [
        {"trial": 1, "value": 0.1, "outcome": "went on"},
        {"trial": 2, "value": 0.5, "outcome": "stopped"},
        {"trial": 3, "value": None, "outcome": "failed"},
    ]
    assert (low["total"], low["wentOn"], low["stopped"], low["failed"]) == (3, 1, 1, 1)
    assert low["underWay"] == [4]
    assert top["underWay"] == [1]

    search.validation_completed(a, {"loss": 0.05, "batches": 16})
    top = shown(search, [a, b, c, d])[0]["rungs"][1]
    assert top["entries"] == [{"trial": 1, "value": 0.05, "outcome": "finished"}]
    assert top["underWay"] == []


def test_values_keep_sign_if_larger_is_better() -> None:
    searcher = {**SEARCHER, "smaller_is_better": False}
    search, ids = started(searcher)
    search.validation_completed(ids[0], {"loss": 0.75, "batches": 4})
    assert shown(search, ids, searcher)[0]["rungs"][0]["entries"][0]["value"] == 0.75


@pytest.mark.parametrize("has_begun", [True, False])
def test_adaptive_search_has_bracket_per_rung_count(has_begun: bool) -> None:
    searcher = {
        **SEARCHER,
        "name": "adaptive_asha",
        "mode": "standard",
        "max_rungs": 3,
        "bracket_rungs": [2, 1],
        "max_trials": 8,
    }
    search, ids = started(searcher)
    found = shown(search, ids, searcher) if has_begun else rungs_of(searcher, {}, frozenset(), {})
    assert [len(bracket["rungs"]) for bracket in found] == [2, 1]
    assert sum(bracket["rungs"][0]["numUnderWay"] for bracket in found) == (len(ids) if has_begun else 0)
