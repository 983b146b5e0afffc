"""Properties that simulated searches with every searcher must have."""

from __future__ import annotations

from typing import Any

from simulated_search import SimulationResult, simulate

from dstrial.config.schema import SEARCHERS
from dstrial.search import preview
from dstrial.search.searcher import METHODS

SPACE = {
    "x": {"type": "double", "minval": 0.0, "maxval": 1.0},
    "n": {"type": "int", "minval": 1, "maxval": 3, "count": 3},
}
ASHA = {"divisor": 4, "max_concurrent_trials": 16, "max_time": 64, "time_metric": "batches"}
ADAPTIVE = {**ASHA, "name": "adaptive_asha", "max_rungs": 5, "bracket_rungs": [], "mode": "standard"}
SEARCHES: list[tuple[str, dict[str, Any]]] = [
    ("single", {"name": "single"}),
    ("random, 10 trials, 4 at once", {"name": "random", "max_trials": 10, "max_concurrent_trials": 4}),
    ("grid, 3 points", {"name": "grid", "max_concurrent_trials": 2}),
    (
        "async_halving, 3 rungs, 32 trials",
        {**ASHA, "name": "async_halving", "num_rungs": 3, "max_trials": 32},
    ),
    ("adaptive_asha, standard, 40 trials", {**ADAPTIVE, "max_trials": 40}),
    ("adaptive_asha, conservative, 40 trials", {**ADAPTIVE, "max_trials": 40, "mode": "conservative"}),
    ("adaptive_asha, aggressive, 40 trials", {**ADAPTIVE, "max_trials": 40, "mode": "aggressive"}),
]
SEEDS = (0, 1, 2)


def config_of(searcher: dict[str, Any]) -> dict[str, Any]:
    space: dict[str, Any] = SPACE
    if searcher["name"] == "grid":
        space = {"n": SPACE["n"]}
    full = {"metric": "loss", "smaller_is_better": True, "max_trials": 1, **searcher}
    return {"hyperparameters": space, "searcher": full}


def loss(hparams: dict[str, Any], time: int) -> float:
    """Return a loss whose ranking of trials is the same at all times, without ties."""
    return hparams.get("x", hparams.get("n", 0)) + 1.0 / time


def play(searcher: dict[str, Any], seed: int) -> SimulationResult:
    return simulate(config_of(searcher), seed, loss, schedule_seed=seed + 100)


def properties(searcher: dict[str, Any], result: SimulationResult) -> str:
    """Return "all" if every property holds, else "not: " and the broken properties."""
    max_time = int(searcher.get("max_time", 1))
    limit = searcher.get("max_concurrent_trials", 1)
    best = min(result.trials, key=lambda trial: loss(trial.hparams, 1))
    checks = {
        "concurrency": result.max_open <= max(limit, 5),
        "no trial past max_time": all(trial.length <= max_time for trial in result.trials),
        "best to the end": best.length == max_time,
        "every trial of the config": len(result.trials)
        == sum(t.count for t in preview(config_of(searcher)).trials),
        "one shutdown": type(result.actions[-1]).__name__ == "Shutdown",
    }
    broken = [name for name, holds in checks.items() if not holds]
    return "all" if not broken else f"not: {', '.join(broken)}"


def test_table_covers_all_searchers() -> None:
    assert {searcher["name"] for _, searcher in SEARCHES} == set(SEARCHERS) == set(METHODS)


def test_independent_searchers_ignore_metric_values() -> None:
    for name, searcher in SEARCHES:
        search = config_of(searcher)
        found = [
            [(trial.hparams, trial.length) for trial in simulate(search, 0, metric).trials]
            for metric in (loss, lambda hparams, time: -loss(hparams, time))
        ]
        assert (found[0] == found[1]) == SEARCHERS[searcher["name"]].is_independent, name


def test_properties_hold_for_all_seeds() -> None:
    broken = {
        (name, seed): properties(searcher, play(searcher, seed))
        for name, searcher in SEARCHES
        for seed in SEEDS
        if properties(searcher, play(searcher, seed)) != "all"
    }

    assert not broken


def test_trials_end_on_rungs() -> None:
    for name, searcher in SEARCHES:
        rungs = {trials.value or 1 for trials in preview(config_of(searcher)).trials}
        for seed in SEEDS:
            assert {trial.length for trial in play(searcher, seed).trials} <= rungs, name
