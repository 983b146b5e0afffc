"""The searchers ``single``, ``random`` and ``grid``, which do not use metrics."""

from __future__ import annotations

import abc
from collections.abc import Collection, Mapping
from typing import Any

from dstrial.search.hyperparameters import Grid
from dstrial.search.method import Create, ExitReason, PreviewedTrials, Stop, complete, create, max_replaced
from dstrial.search.random_state import SearchRandom


class _Independent(abc.ABC):
    """Base of searches whose trials do not depend on metrics of other trials."""

    def __init__(self, max_trials: int, max_concurrent_trials: int) -> None:
        self._max_trials = max_trials
        self._max_concurrent_trials = max_concurrent_trials
        self._num_invalid = 0

    def initial_trials(self, random: SearchRandom) -> list[Create | Stop]:
        count = min(self._max_trials, self._max_concurrent_trials or self._max_trials)
        return [self._create(random) for _ in range(count)]

    def validation_completed(
        self, random: SearchRandom, request_id: str, metrics: Mapping[str, Any]
    ) -> list[Create | Stop]:
        return []

    def trial_exited_early(
        self, random: SearchRandom, request_id: str, reason: ExitReason
    ) -> list[Create | Stop]:
        return []

    def progress(self, trial_progress: Mapping[str, float], closed: Collection[str]) -> float:
        still_open = sum(share for request_id, share in trial_progress.items() if request_id not in closed)
        return (still_open + len(closed)) / (self._max_trials + self._num_invalid)

    @abc.abstractmethod
    def _create(self, random: SearchRandom) -> Create: ...


class RandomSearch(_Independent):
    """Runs ``max_trials`` random trials, ``max_concurrent_trials`` at once (0: all).

    A failed trial counts towards ``max_trials``. A trial with invalid hyperparameters is replaced, up to ``max_replaced`` times
    per search.
    """

    def __init__(
        self, hyperparameters: Mapping[str, Any], *, max_trials: int, max_concurrent_trials: int
    ) -> None:
        super().__init__(max_trials, max_concurrent_trials)
        self._hyperparameters = hyperparameters
        self._max_replaced = max_replaced(hyperparameters, max_trials)
        self._num_created = 0

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RandomSearch:
        searcher = config["searcher"]
        return cls(
            config["hyperparameters"],
            max_trials=searcher["max_trials"],
            max_concurrent_trials=searcher["max_concurrent_trials"],
        )

    @classmethod
    def previewed(cls, config: Mapping[str, Any]) -> tuple[PreviewedTrials, ...]:
        return (PreviewedTrials(config["searcher"]["max_trials"]),)

    def trial_exited_early(
        self, random: SearchRandom, request_id: str, reason: ExitReason
    ) -> list[Create | Stop]:
        if reason is ExitReason.INVALID_HP and self._num_invalid < self._max_replaced:
            self._num_invalid += 1
        return []

    def trial_exited(self, random: SearchRandom, request_id: str) -> list[Create | Stop]:
        if self._num_created - self._num_invalid < self._max_trials:
            return [self._create(random)]
        return []

    def snapshot(self) -> dict[str, Any]:
        return {"num_created": self._num_created, "num_invalid": self._num_invalid}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        self._num_created = snapshot["num_created"]
        self._num_invalid = snapshot["num_invalid"]

    def _create(self, random: SearchRandom) -> Create:
        self._num_created += 1
        return create(self._hyperparameters, random)


class SingleSearch(RandomSearch):
    """Runs one trial, whose hyperparameters are sampled once."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> SingleSearch:
        return cls(config["hyperparameters"], max_trials=1, max_concurrent_trials=1)

    @classmethod
    def previewed(cls, config: Mapping[str, Any]) -> tuple[PreviewedTrials, ...]:
        """Return one entry: a trial that trains its full length."""
        del config
        return (PreviewedTrials(1),)


class GridSearch(_Independent):
    """Runs one trial per grid point, the last point first; no trial is replaced."""

    def __init__(self, hyperparameters: Mapping[str, Any], *, max_concurrent_trials: int) -> None:
        self._grid = Grid(hyperparameters)
        super().__init__(self._grid.num_points, max_concurrent_trials)
        self._num_left = self._grid.num_points

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> GridSearch:
        return cls(
            config["hyperparameters"], max_concurrent_trials=config["searcher"]["max_concurrent_trials"]
        )

    @classmethod
    def previewed(cls, config: Mapping[str, Any]) -> tuple[PreviewedTrials, ...]:
        return (PreviewedTrials(Grid(config["hyperparameters"]).num_points),)

    def trial_exited(self, random: SearchRandom, request_id: str) -> list[Create | Stop]:
        return [self._create(random)] if self._num_left else []

    def snapshot(self) -> dict[str, Any]:
        return {"num_left": self._num_left}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        self._num_left = snapshot["num_left"]

    def _create(self, random: SearchRandom) -> Create:
        self._num_left -= 1
        return complete(self._grid.point(self._num_left), random)
