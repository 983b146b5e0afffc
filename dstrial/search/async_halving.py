"""The searcher ``async_halving``, which stops trials and never pauses them.

A rung is a training time at which trials are compared: only the best ``1 / divisor`` of those that have reached it continue.

Source: Determined 0.38.1, searcher ``async_halving``; Li et al., "A System for Massively Parallel Hyperparameter Tuning", MLSys
2020, in the variant that stops instead of pausing.
"""

from __future__ import annotations

import bisect
import math
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from dstrial.errors import SearchError
from dstrial.search.method import Create, ExitReason, PreviewedTrials, Stop, create, max_replaced
from dstrial.search.random_state import SearchRandom

_WORST = sys.float_info.max
_OVERSHOOT = 1.2


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


class AsyncHalving:
    """A bracket: ranks trials in each rung and stops the worse ones."""

    def __init__(
        self,
        hyperparameters: Mapping[str, Any],
        *,
        metric: str,
        smaller_is_better: bool,
        time_metric: str,
        max_time: int,
        num_rungs: int,
        divisor: float,
        max_trials: int,  # replaced invalid trials do not count
        max_concurrent_trials: int,  # 0 for ``divisor ** (num_rungs - 1)``
    ) -> None:
        self._hyperparameters = hyperparameters
        self._metric = metric
        self._sign = 1.0 if smaller_is_better else -1.0
        self._time_metric = time_metric
        self._units = rung_units(num_rungs, divisor, max_time)
        self._divisor = divisor
        self._max_trials = max_trials
        self._max_replaced = max_replaced(hyperparameters, max_trials)
        if max_concurrent_trials:
            self._num_initial = min(max_concurrent_trials, max_trials)
        else:
            self._num_initial = max(int(min(power(divisor, num_rungs - 1), max_trials)), 1)
        self._rungs: list[list[tuple[float, str]]] = [[] for _ in self._units]
        self._rung_of: dict[str, int] = {}
        self._stopped: set[str] = set()
        self._num_invalid = 0
        self._num_completed = 0

    @property
    def units(self) -> list[int]:
        return list(self._units)

    def owns(self, request_id: str) -> bool:
        return request_id in self._rung_of

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> AsyncHalving:
        searcher = config["searcher"]
        return cls(
            config["hyperparameters"],
            metric=searcher["metric"],
            smaller_is_better=searcher["smaller_is_better"],
            time_metric=searcher["time_metric"],
            max_time=searcher["max_time"],
            num_rungs=searcher["num_rungs"],
            divisor=searcher["divisor"],
            max_trials=searcher["max_trials"],
            max_concurrent_trials=searcher["max_concurrent_trials"],
        )

    @classmethod
    def previewed(cls, config: Mapping[str, Any]) -> tuple[PreviewedTrials, ...]:
        searcher = config["searcher"]
        return previewed_brackets(searcher, [(searcher["num_rungs"], searcher["max_trials"])])

    def initial_trials(self, random: SearchRandom) -> list[Create | Stop]:
        return [self._create(random) for _ in range(self._num_initial)]

    def validation_completed(
        self, random: SearchRandom, request_id: str, metrics: Mapping[str, Any]
    ) -> list[Create | Stop]:
        """Rank the trial in each rung that it has newly reached; stop it if it ranks low."""
        if request_id in self._stopped:
            return []
        value = self._sign * number(metrics, self._metric)
        time = number(metrics, self._time_metric)
        value = _WORST if math.isnan(value) else min(max(value, -_WORST), _WORST)
        for rung in range(self._rung_of[request_id], len(self._units)):
            self._rung_of[request_id] = rung
            if math.isnan(time) or time < self._units[rung]:
                return []
            entries = self._rungs[rung]
            position = bisect.bisect_left(entries, value, key=lambda entry: entry[0])
            entries.insert(position, (value, request_id))
            is_top = rung == len(self._units) - 1
            if is_top or position >= max(int(len(entries) / self._divisor), 1):
                return self._stop(random, request_id)
        return []

    def trial_exited_early(
        self, random: SearchRandom, request_id: str, reason: ExitReason
    ) -> list[Create | Stop]:
        """Rank a failed trial last in its rung; replace one with invalid hyperparameters."""
        # A replaced trial, whose hyperparameters are invalid, is removed from all rungs.
        if request_id in self._stopped:
            return []
        if reason is ExitReason.INVALID_HP and self._num_invalid < self._max_replaced:
            self._num_invalid += 1
            for entries in self._rungs:
                entries[:] = [entry for entry in entries if entry[1] != request_id]
        else:
            self._rungs[self._rung_of[request_id]].append((_WORST, request_id))
        self._stopped.add(request_id)
        return self._replacement(random)

    def trial_exited(self, random: SearchRandom, request_id: str) -> list[Create | Stop]:
        """Count an exited trial; return no actions."""
        self._num_completed += 1
        return []

    def progress(self, trial_progress: Mapping[str, float], closed: Collection[str]) -> float:
        """Return the search's progress, 0 to 1.

        The result is the number of trials that have reached the lowest rung, divided by 1.2 times the maximum number of trials.
        Once all trials have reached this rung, the share of completed trials is returned if larger.
        """
        del trial_progress, closed
        lowest = len(self._rungs[0])
        share = lowest / (_OVERSHOOT * self._max_trials)
        if lowest >= self._max_trials:
            share = max(share, (self._num_completed - self._num_invalid) / self._max_trials)
        return min(share, 1.0)

    def snapshot(self) -> dict[str, Any]:
        return {
            "rungs": [[list(entry) for entry in entries] for entries in self._rungs],
            "rung_of": dict(self._rung_of),
            "stopped": sorted(self._stopped),
            "num_invalid": self._num_invalid,
            "num_completed": self._num_completed,
        }

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        self._rungs = [
            [(value, request_id) for value, request_id in entries] for entries in snapshot["rungs"]
        ]
        self._rung_of = dict(snapshot["rung_of"])
        self._stopped = set(snapshot["stopped"])
        self._num_invalid = snapshot["num_invalid"]
        self._num_completed = snapshot["num_completed"]

    def _stop(self, random: SearchRandom, request_id: str) -> list[Create | Stop]:
        self._stopped.add(request_id)
        return [Stop(request_id), *self._replacement(random)]

    def _replacement(self, random: SearchRandom) -> list[Create | Stop]:
        return [self._create(random)] if len(self._rung_of) - self._num_invalid < self._max_trials else []

    def _create(self, random: SearchRandom) -> Create:
        action = create(self._hyperparameters, random)
        self._rung_of[action.request_id] = 0
        return action


def previewed_brackets(
    searcher: Mapping[str, Any], geometry: Iterable[tuple[int, int]]
) -> tuple[PreviewedTrials, ...]:
    """Return the number of trials for each training time, the shortest time first.

    ``geometry`` has (number of rungs, number of trials) of each bracket.
    """
    stops: Counter[int] = Counter()
    for num_rungs, max_trials in geometry:
        stops.update(bracket_stops(num_rungs, max_trials, float(searcher["divisor"]), searcher["max_time"]))
    return tuple(
        PreviewedTrials(count, searcher["time_metric"], units)
        for units, count in sorted(stops.items())
        if count
    )


def bracket_stops(num_rungs: int, max_trials: int, divisor: float, max_time: int) -> dict[int, int]:
    """Return training time -> number of a bracket's trials that stop at this time."""
    stops: Counter[int] = Counter()
    left = max_trials
    for rung, units in enumerate(rung_units(num_rungs, divisor, max_time)):
        going_on = 0 if rung == num_rungs - 1 or not left else max(int(left / divisor), 1)
        stops[units] += left - going_on
        left = going_on
    return dict(stops)
