"""Make the search method that an experiment config names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dstrial.errors import SearchError
from dstrial.search.adaptive_asha import AdaptiveAsha
from dstrial.search.async_halving import AsyncHalving
from dstrial.search.method import SearchMethod
from dstrial.search.random_search import GridSearch, RandomSearch


def search_method(config: Mapping[str, Any]) -> SearchMethod:
    """Return the method of an experiment config with defaults.

    Raises:
        SearchError: the config names no searcher that exists, which its validation excludes.
    """
    hyperparameters, searcher = config["hyperparameters"], config["searcher"]
    name = searcher["name"]
    if name == "single":
        return RandomSearch(hyperparameters, max_trials=1, max_concurrent_trials=1)
    if name == "random":
        return RandomSearch(
            hyperparameters,
            max_trials=searcher["max_trials"],
            max_concurrent_trials=searcher["max_concurrent_trials"],
        )
    if name == "grid":
        return GridSearch(hyperparameters, max_concurrent_trials=searcher["max_concurrent_trials"])
    if name == "adaptive_asha":
        return AdaptiveAsha(hyperparameters, searcher)
    if name == "async_halving":
        return AsyncHalving(
            hyperparameters,
            metric=searcher["metric"],
            smaller_is_better=searcher["smaller_is_better"],
            time_metric=searcher["time_metric"],
            max_time=searcher["max_time"],
            num_rungs=searcher["num_rungs"],
            divisor=searcher["divisor"],
            max_trials=searcher["max_trials"],
            max_concurrent_trials=searcher["max_concurrent_trials"],
        )
    raise SearchError(f"searcher.name is {name!r}; expected a searcher that exists. Set it to adaptive_asha.")
