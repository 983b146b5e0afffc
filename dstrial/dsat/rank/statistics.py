"""Statistics of step times: end of warm-up, confidence interval of the median."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

_NUM_RESAMPLES = 500
_LEVEL = 0.95
_FIRST_TIMED_STEP = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Interval:
    """A median with its 95 % confidence interval."""

    median: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half of the interval's width, relative to the median."""
        return (self.high - self.low) / (2 * self.median) if self.median else math.inf


def warm_from(values: Sequence[float]) -> int:
    """Return the index in ``values``, times of steps, at which warm-up has ended.

    This is the change point in the first half that best divides the logarithms of the times into two levels; 0 unless the first
    level is at least 5 % higher. A single slow step later on is no change point.

    Source: least-squares segmentation into two levels, Hinkley 1970.
    """
    if len(values) < 3:
        return 0
    logs = np.log(np.maximum(np.asarray(values, dtype=np.float64), 1e-12))
    best_idx, best_cost = 0, float(np.sum(np.abs(logs - np.median(logs))))
    for idx in range(1, len(logs) // 2 + 1):
        first, rest = logs[:idx], logs[idx:]
        cost = float(np.sum(np.abs(first - np.median(first))) + np.sum(np.abs(rest - np.median(rest))))
        if cost < best_cost and np.median(first) > np.median(rest) + math.log(1.05):
            best_idx, best_cost = idx, cost
    return best_idx


def median_interval(values: Sequence[float], seed: int = 0) -> Interval:
    """Return the median and its bootstrap confidence interval.

    The interval is infinite if there are fewer than three values.

    Source: percentile bootstrap, Efron 1979.
    """
    given = np.asarray(values, dtype=np.float64)
    median = float(np.median(given))
    if len(given) < 3:
        return Interval(median, -math.inf, math.inf)
    drawn = np.random.RandomState(seed).randint(0, len(given), (_NUM_RESAMPLES, len(given)))
    medians = np.median(given[drawn], axis=1)
    low, high = np.quantile(medians, [(1 - _LEVEL) / 2, (1 + _LEVEL) / 2])
    return Interval(median, float(low), float(high))


@dataclasses.dataclass(frozen=True, slots=True)
class SamplingLimits:
    """Limits that decide when enough steps are timed."""

    target_half_width: float = 0.015  # relative; of the 95 % interval of the median
    min_windows: int = 6  # after warm-up
    max_windows: int = 60  # in all
    window_s: float = 0.1  # a window has as many steps as fill this time
    max_s: float = 60.0  # no window begins after this time, if there are three windows after warm-up
    min_steps: int = 6  # in all, warm-up included
    first_step: int = 0  # steps before it, counted from 1, are warm-up; step 1 counts FLOPs, untimed


class Sampling:
    """Collects times of windows of consecutive steps until enough steps are timed."""

    def __init__(self, limits: SamplingLimits) -> None:
        self._limits = limits
        self._times_s: list[float] = []
        self._num_steps: list[int] = []
        self._total_s = 0.0

    def add(self, num_steps: int, seconds: float) -> None:
        self._times_s.append(seconds / num_steps)
        self._num_steps.append(num_steps)
        self._total_s += seconds

    @property
    def num_warm_up_steps(self) -> int:
        """Number of timed steps that belong to warm-up."""
        return sum(self._num_steps[: self._first()])

    @property
    def num_steps(self) -> int:
        """Number of timed steps, warm-up included."""
        return sum(self._num_steps)

    def interval(self) -> Interval:
        """Return the median seconds per step after warm-up, with its confidence interval."""
        return median_interval(self._times_s[self._first() :])

    def _first(self) -> int:
        """Return the index of the first window after warm-up."""
        step = _FIRST_TIMED_STEP
        for idx, num_steps in enumerate(self._num_steps):
            if step >= self._limits.first_step:
                return idx + warm_from(self._times_s[idx:])
            step += num_steps
        return warm_from(self._times_s)

    def mean_s(self) -> float:
        """Return the mean seconds of one step after warm-up.

        The median serves to compare configurations; the mean, which includes slow steps, to predict a training.
        """
        first = self._first()
        times_s, num_steps = self._times_s[first:], self._num_steps[first:]
        whole_s = sum(time_s * steps for time_s, steps in zip(times_s, num_steps, strict=True))
        return whole_s / sum(num_steps)

    def next_steps(self) -> int:
        """Return the number of steps of the next window; 0 if enough are timed."""
        limits = self._limits
        if not self._times_s:
            return 1
        before_first = limits.first_step - _FIRST_TIMED_STEP - self.num_steps
        if before_first > 0 and len(self._times_s) < limits.max_windows and self._total_s < limits.max_s:
            return before_first
        warm = self._times_s[self._first() :]
        size = max(1, min(round(limits.window_s / max(min(warm), 1e-6)), 1000))
        if len(self._times_s) >= limits.max_windows:
            return 0
        if len(warm) >= 3 and self._total_s >= limits.max_s:
            return 0
        if len(warm) < limits.min_windows or self.num_steps < limits.min_steps:
            return size
        return size if self.interval().half_width > limits.target_half_width else 0
