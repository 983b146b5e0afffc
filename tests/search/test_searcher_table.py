"""The table of searches shows no broken property, and ends that lie on rungs only."""

from __future__ import annotations

from searcher_table import SEARCHES, SEEDS, config_of, loss, play, properties
from simulated_search import simulate

from dstrial.config.schema import SEARCHERS
from dstrial.search import preview
from dstrial.search.searcher import METHODS


def test_every_searcher_is_in_the_table() -> None:
    assert {searcher["name"] for _, searcher in SEARCHES} == set(SEARCHERS) == set(METHODS)


def test_trials_of_independent_searchers_are_the_same_whatever_their_metrics_are() -> None:
    for name, searcher in SEARCHES:
        search = config_of(searcher)
        found = [
            [(trial.hparams, trial.length) for trial in simulate(search, 0, metric).trials]
            for metric in (loss, lambda hparams, time: -loss(hparams, time))
        ]
        assert (found[0] == found[1]) == SEARCHERS[searcher["name"]].is_independent, name


def test_every_property_holds_for_every_seed() -> None:
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
