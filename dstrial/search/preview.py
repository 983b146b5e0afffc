"""What a search would do, from its config alone: how many trials train how long."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from dstrial.search.adaptive_asha import brackets
from dstrial.search.async_halving import rung_units
from dstrial.search.hyperparameters import Grid


@dataclasses.dataclass(frozen=True, slots=True)
class PreviewedTrials:
    """Trials that train equally long.

    Attributes:
        count: how many.
        unit: the time metric; None for trials that train to their own end.
        value: how long, in that unit; None for trials that train to their own end.
    """

    count: int
    unit: str | None = None
    value: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class SearchSummary:
    """A search before it runs.

    Attributes:
        config: the searcher's section of the experiment config.
        trials: trials by how long they train, shortest first, if no validations are equal and none fails.
    """

    config: dict[str, Any]
    trials: tuple[PreviewedTrials, ...]


def preview(config: Mapping[str, Any]) -> SearchSummary:
    """Preview the search of an experiment config with defaults.

    Source: Determined 0.38.1, ``preview-hp-search``, which refuses ``async_halving``; here its rungs are shown.
    """
    searcher = dict(config["searcher"])
    name = searcher["name"]
    if name in ("adaptive_asha", "async_halving"):
        stops: Counter[int] = Counter()
        if name == "adaptive_asha":
            geometry: Iterable[tuple[int, int]] = [(b.num_rungs, b.max_trials) for b in brackets(searcher)]
        else:
            geometry = [(searcher["num_rungs"], searcher["max_trials"])]
        for num_rungs, max_trials in geometry:
            stops.update(
                bracket_stops(num_rungs, max_trials, float(searcher["divisor"]), searcher["max_time"])
            )
        trials = tuple(
            PreviewedTrials(count, searcher["time_metric"], units)
            for units, count in sorted(stops.items())
            if count
        )
        return SearchSummary(searcher, trials)
    if name == "grid":
        return SearchSummary(searcher, (PreviewedTrials(Grid(config["hyperparameters"]).num_points),))
    count = searcher["max_trials"] if name == "random" else 1
    return SearchSummary(searcher, (PreviewedTrials(count),))


def bracket_stops(num_rungs: int, max_trials: int, divisor: float, max_time: int) -> dict[int, int]:
    """Return how many trials of one bracket end at each rung's time."""
    stops: Counter[int] = Counter()
    left = max_trials
    for rung, units in enumerate(rung_units(num_rungs, divisor, max_time)):
        going_on = 0 if rung == num_rungs - 1 or not left else max(int(left / divisor), 1)
        stops[units] += left - going_on
        left = going_on
    return dict(stops)
