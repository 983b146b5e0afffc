"""The table of searches shows no broken property, and ends that lie on rungs only."""

from __future__ import annotations

from searcher_table import SEARCHES, SEEDS, config_of, play, properties

from dstrial.search import preview


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
