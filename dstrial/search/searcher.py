"""Run an experiment's search: method, random generator and shutdown."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from dstrial.errors import SearchError
from dstrial.search.halving import Halving
from dstrial.search.method import Action, Create, ExitReason, PreviewedTrials, SearchMethod, Shutdown, Stop
from dstrial.search.random_search import GridSearch, RandomSearch, SingleSearch
from dstrial.search.sampling import SearchRandom

METHODS: dict[str, type[SearchMethod]] = {
    "single": SingleSearch,
    "random": RandomSearch,
    "grid": GridSearch,
    "adaptive_asha": Halving,
    "async_halving": Halving,
}
"""Name of a searcher -> search method; ``dstrial.config.schema.SEARCHERS`` has the config keys."""


@dataclasses.dataclass(frozen=True, slots=True)
class SearchSummary:
    """The trials that a search would train, as ``preview`` returns them."""

    config: dict[str, Any]  # the experiment config's section ``searcher``
    trials: tuple[PreviewedTrials, ...]  # shortest first; assumes no equal validations and no failed trial


def preview(config: Mapping[str, Any]) -> SearchSummary:
    """Return how many trials a search would train, and for how long.

    ``config`` is an experiment config in which defaults are filled in.

    Raises:
        SearchError: the searcher does not exist, or its settings are invalid.

    Source: Determined 0.38.1, ``preview-hp-search``. Unlike Determined's command, this function supports ``async_halving``.
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


class Searcher:
    """A running search; its methods handle events of trials and return actions.

    The caller must report the exit of every created trial with :meth:`trial_exited`. The actions after the last exit end with
    ``Shutdown``. Events of an exited trial are ignored. Validations of a stopped trial are ignored too, because the trial may
    still report while it saves its last checkpoint.
    """

    def __init__(self, config: Mapping[str, Any], seed: int) -> None:
        self._method = _named(config)(config)
        self._random = SearchRandom(seed)
        self._requested: list[str] = []
        self._closed: set[str] = set()
        self._failed: set[str] = set()
        self._cancelled: set[str] = set()
        self._stopped: set[str] = set()
        self._is_shut_down = False

    @classmethod
    def new(cls, config: Mapping[str, Any], seed: int) -> Searcher:
        """Return a new search; call :meth:`initial_trials` next."""
        return cls(config, seed)

    @classmethod
    def restore(cls, config: Mapping[str, Any], snapshot: Mapping[str, Any]) -> Searcher:
        searcher = cls(config, 0)
        searcher._random = SearchRandom.restore(snapshot["random"])
        searcher._method.restore(snapshot["method"])
        searcher._requested = list(snapshot["requested"])
        for name in ("closed", "failed", "cancelled", "stopped"):
            setattr(searcher, f"_{name}", set(snapshot[name]))
        searcher._is_shut_down = snapshot["is_shut_down"]
        return searcher

    def snapshot(self) -> dict[str, Any]:
        return {
            "random": self._random.snapshot(),
            "method": self._method.snapshot(),
            "requested": list(self._requested),
            "closed": sorted(self._closed),
            "failed": sorted(self._failed),
            "cancelled": sorted(self._cancelled),
            "stopped": sorted(self._stopped),
            "is_shut_down": self._is_shut_down,
        }

    def initial_trials(self) -> list[Action]:
        return self._finished(self._method.initial_trials(self._random))

    def validation_completed(self, request_id: str, metrics: Mapping[str, Any]) -> list[Action]:
        if request_id in self._closed or request_id in self._stopped:
            return []
        return self._finished(self._method.validation_completed(self._random, request_id, metrics))

    def trial_exited_early(self, request_id: str, reason: ExitReason) -> list[Action]:
        """Handle a trial that failed, was cancelled or has invalid hyperparameters.

        The caller must call :meth:`trial_exited` afterwards.
        """
        if request_id in self._closed or request_id in self._failed | self._cancelled:
            return []
        if reason is ExitReason.ERRORED:
            self._failed.add(request_id)
        elif reason is ExitReason.USER_CANCELED:
            self._cancelled.add(request_id)
        return self._finished(self._method.trial_exited_early(self._random, request_id, reason))

    def trial_exited(self, request_id: str) -> list[Action]:
        """Handle the exit of a trial; the last trial's exit ends the search."""
        if request_id in self._closed:
            return []
        self._closed.add(request_id)
        return self._finished(self._method.trial_exited(self._random, request_id))

    def progress(self, trial_progress: Mapping[str, float], closed: Collection[str] | None = None) -> float:
        """Return the progress of the search, 0 to 1.

        ``trial_progress``: request id -> progress of a trial, 0 to 1. ``closed``: request ids of exited trials; by default,
        those reported to this searcher.
        """
        if self._is_shut_down:
            return 1.0
        share = self._method.progress(trial_progress, self._closed if closed is None else closed)
        return min(max(share, 0.0), 1.0) if share == share else 0.0

    def _finished(self, actions: Sequence[Create | Stop]) -> list[Action]:
        for action in actions:
            if isinstance(action, Create):
                self._requested.append(action.request_id)
            else:
                self._stopped.add(action.request_id)
        if self._is_shut_down or len(self._closed) < len(self._requested) or not self._requested:
            return list(actions)
        self._is_shut_down = True
        everyone = set(self._requested)
        shutdown = Shutdown(cancel=self._cancelled == everyone, failure=self._failed == everyone)
        return [*actions, shutdown]
