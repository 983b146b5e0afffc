"""The searchers ``async_halving`` and ``adaptive_asha``.

These searchers stop trials and never pause trials. A rung is a training time at which the trials of a bracket are compared. Of
the trials that have reached a rung, only the best ``1 / divisor`` continue. ``async_halving`` has one bracket;
``adaptive_asha`` divides the search's trials among several brackets.

Source: Determined 0.38.1, searchers ``async_halving`` and ``adaptive_asha``; Li et al., "A System for Massively Parallel
Hyperparameter Tuning", MLSys 2020, in the variant that stops instead of pausing.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from dstrial.errors import SearchError
from dstrial.search.method import (
    Create,
    ExitReason,
    PreviewedTrials,
    SearchMethod,
    Stop,
    create,
    max_replaced,
)
from dstrial.search.sampling import SearchRandom

_WORST = sys.float_info.max  # stands for NaN and for failed trials, which rank last
_OVERSHOOT = 1.2  # when all trials have reached the lowest rung, the progress is 1 / 1.2, as in Determined


@dataclasses.dataclass(frozen=True, slots=True)
class Bracket:
    """Number of rungs and numbers of trials of one bracket."""

    num_rungs: int
    max_trials: int  # without trials that are replaced because of invalid hyperparameters
    max_concurrent_trials: int  # 0 means ``divisor ** (num_rungs - 1)``


def brackets(searcher: Mapping[str, Any]) -> list[Bracket]:
    """Return the brackets of a searcher, the bracket with the most rungs first.

    ``searcher`` is the config's ``searcher`` section with defaults filled in.

    Raises:
        SearchError: ``bracket_rungs`` has a value that is no positive integer.
    """
    divisor, max_trials = float(searcher["divisor"]), int(searcher["max_trials"])
    if searcher["name"] == "async_halving":
        return [Bracket(searcher["num_rungs"], max_trials, int(searcher["max_concurrent_trials"]))]
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
    """Divide ``max_trials`` trials among brackets; return the number for each bracket.

    All brackets then train for about the same total time. ``rungs`` has the number of rungs of each bracket, in descending
    order. Each bracket has at least one trial.
    """
    weights = [power(divisor, num - 1) / num for num in rungs]
    if math.isinf(sum(weights)):
        weights = [power(divisor, num - max(rungs)) / num for num in rungs]
    trials = [max(int(weight / sum(weights) * max_trials), 1) for weight in weights]
    trials[0] += max(max_trials - sum(trials), 0)
    return trials


def bracket_concurrency(max_concurrent_trials: int, divisor: float, trials: Sequence[int]) -> list[int]:
    """Return the maximum number of concurrent trials of each bracket, at least 1.

    ``max_concurrent_trials`` is the maximum of all brackets together, and is divided equally. If it is 0, each bracket runs the
    larger of ``divisor`` and the number of trials of the last bracket. ``trials`` has the number of trials of each bracket.
    """
    if max_concurrent_trials == 0:
        return [max(trials[-1], int(min(divisor, sys.maxsize)))] * len(trials)
    each, rest = divmod(max(max_concurrent_trials, len(trials)), len(trials))
    return [each + (1 if i < rest else 0) for i in range(len(trials))]


def rung_units(num_rungs: int, divisor: float, max_time: int) -> list[int]:
    """Return each rung's training time, lowest first, in units of the time metric."""
    return [max(int(max_time / power(divisor, num_rungs - 1 - i)), 1) for i in range(num_rungs)]


def power(divisor: float, exponent: int) -> float:
    """Return ``divisor ** exponent``; infinity if a float overflows."""
    try:
        return float(divisor) ** exponent
    except OverflowError:
        return math.inf


def number(metrics: Mapping[str, Any], name: str) -> float:
    """Return metric ``name`` of a validation as a float; infinite on overflow.

    The texts ``NaN``, ``Infinity`` and ``-Infinity`` are accepted as numbers.

    Raises:
        SearchError: the metric is missing or not a number.
    """
    if name not in metrics:
        have = ", ".join(sorted(map(str, metrics))) or "none"
        raise SearchError(
            f"the validation metric {name!r} is missing; expected it in every validation (reported: {have}). "
            "Report it, or correct searcher.metric or searcher.time_metric."
        )
    value = metrics[name]
    if isinstance(value, str) and value in ("NaN", "Infinity", "-Infinity"):
        return float(value.replace("Infinity", "inf"))
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise SearchError(f"the validation metric {name!r} is {value!r}; expected a number. Report a number.")
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


class Halving(SearchMethod):
    """The search method of ``async_halving`` and ``adaptive_asha``: runs all brackets."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        searcher = config["searcher"]
        self._brackets = [_Halving(config["hyperparameters"], searcher, one) for one in brackets(searcher)]

    @classmethod
    def previewed(cls, config: Mapping[str, Any]) -> tuple[PreviewedTrials, ...]:
        searcher = config["searcher"]
        divisor, max_time = float(searcher["divisor"]), searcher["max_time"]
        stops: Counter[int] = Counter()
        for bracket in brackets(searcher):
            left = bracket.max_trials
            for rung, units in enumerate(rung_units(bracket.num_rungs, divisor, max_time)):
                going_on = 0 if rung == bracket.num_rungs - 1 or not left else max(int(left / divisor), 1)
                stops[units] += left - going_on
                left = going_on
        return tuple(
            PreviewedTrials(count, searcher["time_metric"], units)
            for units, count in sorted(stops.items())
            if count
        )

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
        self._of(request_id).num_completed += 1
        return []

    def progress(self, trial_progress: Mapping[str, float], closed: Collection[str]) -> float:
        """Return the mean progress of the brackets, 0 to 1; both arguments are ignored."""
        return sum(bracket.progress() for bracket in self._brackets) / len(self._brackets)

    def snapshot(self) -> dict[str, Any]:
        return {"brackets": [bracket.snapshot() for bracket in self._brackets]}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        for bracket, state in zip(self._brackets, snapshot["brackets"], strict=True):
            bracket.restore(state)

    def _of(self, request_id: str) -> _Halving:
        return next(bracket for bracket in self._brackets if request_id in bracket.rung_of)


class _Halving:
    """Runs one bracket: ranks trials in each rung and stops the worse trials."""

    def __init__(
        self, hyperparameters: Mapping[str, Any], searcher: Mapping[str, Any], bracket: Bracket
    ) -> None:
        self._hyperparameters = hyperparameters
        self._metric, self._time_metric = searcher["metric"], searcher["time_metric"]
        self._sign = 1.0 if searcher["smaller_is_better"] else -1.0
        self._divisor = searcher["divisor"]
        self._units = rung_units(bracket.num_rungs, self._divisor, searcher["max_time"])
        self._max_trials = bracket.max_trials
        self._max_replaced = max_replaced(hyperparameters, bracket.max_trials)
        num_initial = bracket.max_concurrent_trials or power(self._divisor, bracket.num_rungs - 1)
        self._num_initial = max(int(min(num_initial, bracket.max_trials)), 1)
        self._rungs: list[list[tuple[float, str]]] = [[] for _ in self._units]
        self.rung_of: dict[str, int] = {}
        self._stopped: set[str] = set()
        self._num_invalid = 0
        self.num_completed = 0

    def initial_trials(self, random: SearchRandom) -> list[Create]:
        return [self._create(random) for _ in range(self._num_initial)]

    def validation_completed(
        self, random: SearchRandom, request_id: str, metrics: Mapping[str, Any]
    ) -> list[Create | Stop]:
        """Rank the trial in each rung that the trial has newly reached.

        The trial is stopped if it is not among the best ``1 / divisor`` of a rung, or has reached the highest rung. Then return
        a ``Stop`` and, if the bracket has another trial, a ``Create`` for that trial. Otherwise return [].
        """
        if request_id in self._stopped:
            return []
        value = self._sign * number(metrics, self._metric)
        time = number(metrics, self._time_metric)
        value = _WORST if math.isnan(value) else min(max(value, -_WORST), _WORST)
        for rung in range(self.rung_of[request_id], len(self._units)):
            self.rung_of[request_id] = rung
            if math.isnan(time) or time < self._units[rung]:
                return []
            entries = self._rungs[rung]
            position = bisect.bisect_left(entries, value, key=lambda entry: entry[0])
            entries.insert(position, (value, request_id))
            is_top = rung == len(self._units) - 1
            if is_top or position >= max(int(len(entries) / self._divisor), 1):
                self._stopped.add(request_id)
                return [Stop(request_id), *self._replacement(random)]
        return []

    def trial_exited_early(
        self, random: SearchRandom, request_id: str, reason: ExitReason
    ) -> list[Create | Stop]:
        """Rank a failed trial last in its rung; return a ``Create`` for the next trial.

        A trial with invalid hyperparameters is instead removed from all rungs and does not count as one of the bracket's
        trials, up to ``max_replaced`` times. Return [] if the bracket has no more trials, or if the trial was already stopped.
        """
        if request_id in self._stopped:
            return []
        if reason is ExitReason.INVALID_HP and self._num_invalid < self._max_replaced:
            self._num_invalid += 1
            for entries in self._rungs:
                entries[:] = [entry for entry in entries if entry[1] != request_id]
        else:
            self._rungs[self.rung_of[request_id]].append((_WORST, request_id))
        self._stopped.add(request_id)
        return self._replacement(random)

    def progress(self) -> float:
        """Return the progress of the bracket, 0 to 1.

        The result is the number of trials that have reached the lowest rung, divided by 1.2 times the maximum number of trials.
        Once all trials have reached this rung, the result is the fraction of completed trials, if that is larger.
        """
        lowest = len(self._rungs[0])
        share = lowest / (_OVERSHOOT * self._max_trials)
        if lowest >= self._max_trials:
            share = max(share, (self.num_completed - self._num_invalid) / self._max_trials)
        return min(share, 1.0)

    def snapshot(self) -> dict[str, Any]:
        return {
            "rungs": [[list(entry) for entry in entries] for entries in self._rungs],
            "rung_of": dict(self.rung_of),
            "stopped": sorted(self._stopped),
            "num_invalid": self._num_invalid,
            "num_completed": self.num_completed,
        }

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        self._rungs = [
            [(value, request_id) for value, request_id in entries] for entries in snapshot["rungs"]
        ]
        self.rung_of = dict(snapshot["rung_of"])
        self._stopped = set(snapshot["stopped"])
        self._num_invalid = snapshot["num_invalid"]
        self.num_completed = snapshot["num_completed"]

    def _replacement(self, random: SearchRandom) -> list[Create | Stop]:
        return [self._create(random)] if len(self.rung_of) - self._num_invalid < self._max_trials else []

    def _create(self, random: SearchRandom) -> Create:
        action = create(self._hyperparameters, random)
        self.rung_of[action.request_id] = 0
        return action
