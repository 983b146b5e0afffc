"""The searchers by name: make or preview the one that a config names."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from dstrial.errors import SearchError
from dstrial.search.adaptive_asha import AdaptiveAsha
from dstrial.search.async_halving import AsyncHalving
from dstrial.search.method import PreviewedTrials, SearchMethod
from dstrial.search.random_search import GridSearch, RandomSearch, SingleSearch

METHODS: dict[str, type[SearchMethod]] = {
    "single": SingleSearch,
    "random": RandomSearch,
    "grid": GridSearch,
    "adaptive_asha": AdaptiveAsha,
    "async_halving": AsyncHalving,
}
"""Name -> what runs it; ``dstrial.config.schema.SEARCHERS`` says what its config may have."""


@dataclasses.dataclass(frozen=True, slots=True)
class SearchSummary:
    """A search before it runs.

    Attributes:
        config: the searcher's section of the experiment config.
        trials: trials by how long they train, shortest first, if no validations are equal and none fails.
    """

    config: dict[str, Any]
    trials: tuple[PreviewedTrials, ...]


def search_method(config: Mapping[str, Any]) -> SearchMethod:
    """Return the method of an experiment config with defaults.

    Raises:
        SearchError: the config names no searcher that exists, which its validation excludes.
    """
    return _named(config).from_config(config)


def preview(config: Mapping[str, Any]) -> SearchSummary:
    """Preview the search of an experiment config with defaults.

    Raises:
        SearchError: the config names no searcher that exists, which its validation excludes.

    Source: Determined 0.38.1, ``preview-hp-search``, which refuses ``async_halving``; here its rungs are shown.
    """
    trials = _named(config).previewed(config)
    return SearchSummary(dict(config["searcher"]), trials)


def _named(config: Mapping[str, Any]) -> type[SearchMethod]:
    name = config["searcher"]["name"]
    if name not in METHODS:
        raise SearchError(
            f"searcher.name is {name!r}; expected a searcher that exists. Set it to adaptive_asha."
        )
    return METHODS[name]
