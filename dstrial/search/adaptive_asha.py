"""The searcher ``adaptive_asha``: several brackets of ``async_halving``."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from dstrial.errors import SearchError
from dstrial.search.async_halving import AsyncHalving, power, previewed_brackets
from dstrial.search.method import Create, ExitReason, PreviewedTrials, Stop
from dstrial.search.random_state import SearchRandom


@dataclasses.dataclass(frozen=True, slots=True)
class Bracket:
    num_rungs: int
    max_trials: int
    max_concurrent_trials: int


def brackets(searcher: Mapping[str, Any]) -> list[Bracket]:
    """Return the brackets of an ``adaptive_asha`` config, most rungs first.

    ``searcher`` is the config's ``searcher`` section with defaults filled in.

    Source: Determined 0.38.1, searcher ``adaptive_asha``.
    """
    divisor, max_trials = float(searcher["divisor"]), int(searcher["max_trials"])
    rungs = list(searcher["bracket_rungs"] or ())
    if not rungs:
        highest = min(
            int(searcher["max_rungs"]),
            int(math.log(searcher["max_time"]) / math.log(divisor)) + 1,
            int(math.log(max_trials) / math.log(divisor)) + 1,
        )
        lowest = {"conservative": 1, "standard": (highest - 1) // 2 + 1, "aggressive": highest}[
            searcher["mode"]
        ]
        rungs = list(range(lowest, highest + 1))
    for num_rungs in rungs:
        if isinstance(num_rungs, bool) or not isinstance(num_rungs, int) or num_rungs < 1:
            raise SearchError(
                f"searcher.bracket_rungs has {num_rungs!r}; expected integers of at least 1. "
                "List the number of rungs of each bracket, or leave bracket_rungs out."
            )
    rungs.sort(reverse=True)
    trials = bracket_trials(max_trials, divisor, rungs)
    concurrent = bracket_concurrency(int(searcher["max_concurrent_trials"]), divisor, trials)
    return [Bracket(*geometry) for geometry in zip(rungs, trials, concurrent, strict=True)]


def bracket_trials(max_trials: int, divisor: float, rungs: Sequence[int]) -> list[int]:
    """Return the number of trials of each bracket, for about equal training time.

    ``rungs`` has the number of rungs of each bracket, in descending order.
    """
    weights = [power(divisor, num - 1) / num for num in rungs]
    if math.isinf(sum(weights)):
        weights = [power(divisor, num - max(rungs)) / num for num in rungs]
    trials = [max(int(weight / sum(weights) * max_trials), 1) for weight in weights]
    trials[0] += max(max_trials - sum(trials), 0)
    return trials


def bracket_concurrency(max_concurrent_trials: int, divisor: float, trials: Sequence[int]) -> list[int]:
    """Return the number of concurrent trials of each bracket, at least 1.

    ``trials`` has the number of trials of each bracket. With a ``max_concurrent_trials`` of 0, the total is not limited.
    """
    if max_concurrent_trials == 0:
        return [max(trials[-1], int(min(divisor, sys.maxsize)))] * len(trials)
    each, rest = divmod(max(max_concurrent_trials, len(trials)), len(trials))
    return [each + (1 if i < rest else 0) for i in range(len(trials))]


class AdaptiveAsha:
    """Several ``AsyncHalving`` brackets, among which the trials are divided."""

    def __init__(self, hyperparameters: Mapping[str, Any], searcher: Mapping[str, Any]) -> None:
        self._brackets = [
            AsyncHalving(
                hyperparameters,
                metric=searcher["metric"],
                smaller_is_better=searcher["smaller_is_better"],
                time_metric=searcher["time_metric"],
                max_time=searcher["max_time"],
                num_rungs=bracket.num_rungs,
                divisor=searcher["divisor"],
                max_trials=bracket.max_trials,
                max_concurrent_trials=bracket.max_concurrent_trials,
            )
            for bracket in brackets(searcher)
        ]

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> AdaptiveAsha:
        return cls(config["hyperparameters"], config["searcher"])

    @classmethod
    def previewed(cls, config: Mapping[str, Any]) -> tuple[PreviewedTrials, ...]:
        searcher = config["searcher"]
        return previewed_brackets(searcher, [(one.num_rungs, one.max_trials) for one in brackets(searcher)])

    def initial_trials(self, random: SearchRandom) -> list[Create | Stop]:
        return [action for bracket in self._brackets for action in bracket.initial_trials(random)]

    def validation_completed(
        self, random: SearchRandom, request_id: str, metrics: Mapping[str, Any]
    ) -> list[Create | Stop]:
        return self._of(request_id).validation_completed(random, request_id, metrics)

    def trial_exited_early(
        self, random: SearchRandom, request_id: str, reason: ExitReason
    ) -> list[Create | Stop]:
        return self._of(request_id).trial_exited_early(random, request_id, reason)

    def trial_exited(self, random: SearchRandom, request_id: str) -> list[Create | Stop]:
        return self._of(request_id).trial_exited(random, request_id)

    def progress(self, trial_progress: Mapping[str, float], closed: Collection[str]) -> float:
        shares = [
            bracket.progress(
                {key: trial_progress[key] for key in trial_progress if bracket.owns(key)}, closed
            )
            for bracket in self._brackets
        ]
        return sum(shares) / len(shares)

    def snapshot(self) -> dict[str, Any]:
        return {"brackets": [bracket.snapshot() for bracket in self._brackets]}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        for bracket, state in zip(self._brackets, snapshot["brackets"], strict=True):
            bracket.restore(state)

    def _of(self, request_id: str) -> AsyncHalving:
        return next(bracket for bracket in self._brackets if bracket.owns(request_id))
