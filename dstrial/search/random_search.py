"""The searchers ``single``, ``random`` and ``grid``, which do not use metrics."""

from __future__ import annotations

import abc
from collections.abc import Collection, Mapping
from typing import Any

from dstrial.search.method import (
    Create,
    ExitReason,
    PreviewedTrials,
    SearchMethod,
    Stop,
    complete,
    create,
    max_replaced,
)
from dstrial.search.sampling import Grid, SearchRandom


class _Independent(SearchMethod):
    """Base of searches that ignore metrics: a new trial starts when a trial exits."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        (trials,) = self.previewed(config)
        self._max_trials = trials.count
        self._max_concurrent_trials = config["searcher"].get("max_concurrent_trials") or trials.count
        self._num_created = 0
        self._num_invalid = 0  # trials that were replaced

    def initial_trials(self, random: SearchRandom) -> list[Create | Stop]:
        return [self._next(random) for _ in range(min(self._max_trials, self._max_concurrent_trials))]

    def trial_exited(self, random: SearchRandom, request_id: str) -> list[Create | Stop]:
        return [self._next(random)] if self._num_created - self._num_invalid < self._max_trials else []

    def progress(self, trial_progress: Mapping[str, float], closed: Collection[str]) -> float:
        still_open = sum(share for request_id, share in trial_progress.items() if request_id not in closed)
        return (still_open + len(closed)) / (self._max_trials + self._num_invalid)

    def snapshot(self) -> dict[str, Any]:
        return {"num_created": self._num_created, "num_invalid": self._num_invalid}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        self._num_created = snapshot["num_created"]
        self._num_invalid = snapshot["num_invalid"]

    def _next(self, random: SearchRandom) -> Create:
        self._num_created += 1
        return self._create(random)

    @abc.abstractmethod
    def _create(self, random: SearchRandom) -> Create: ...


class RandomSearch(_Independent):
    """Runs ``max_trials`` random trials.

    At most ``max_concurrent_trials`` run at the same time; 0 means no limit.
    A failed trial counts towards ``max_trials``. A trial with invalid hyperparameters is replaced, up to ``max_replaced`` times
    per search.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self._hyperparameters = config["hyperparameters"]
        self._max_replaced = max_replaced(self._hyperparameters, self._max_trials)

    @classmethod
    def previewed(cls, config: Mapping[str, Any]) -> tuple[PreviewedTrials, ...]:
        return (PreviewedTrials(config["searcher"]["max_trials"]),)

    def trial_exited_early(
        self, random: SearchRandom, request_id: str, reason: ExitReason
    ) -> list[Create | Stop]:
        if reason is ExitReason.INVALID_HP and self._num_invalid < self._max_replaced:
            self._num_invalid += 1
        return []

    def _create(self, random: SearchRandom) -> Create:
        return create(self._hyperparameters, random)


class SingleSearch(RandomSearch):
    """Runs one trial, whose hyperparameters are sampled once."""

    @classmethod
    def previewed(cls, config: Mapping[str, Any]) -> tuple[PreviewedTrials, ...]:
        """Return one entry: a trial that trains its full length."""
        del config
        return (PreviewedTrials(1),)


class GridSearch(_Independent):
    """Runs one trial per grid point, the last point first; no trial is replaced."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self._grid = Grid(config["hyperparameters"])

    @classmethod
    def previewed(cls, config: Mapping[str, Any]) -> tuple[PreviewedTrials, ...]:
        return (PreviewedTrials(Grid(config["hyperparameters"]).num_points),)

    def _create(self, random: SearchRandom) -> Create:
        return complete(self._grid.point(self._max_trials - self._num_created), random)
