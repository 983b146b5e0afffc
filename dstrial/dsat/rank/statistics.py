"""Statistics of step times: end of warm-up, median and its confidence interval."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

_NUM_RESAMPLES = 500  # of the bootstrap
_FIRST_TIMED_STEP = 2  # counted from 1; FLOPs are counted in step 1
_RANGE = (0.025, 0.975)  # quantiles of the windows between which the mean step of a training is expected
_LEAST_RANGE = 0.05  # least distance of these bounds from the measured mean, relative


def warm_from(values: Sequence[float]) -> int:
    """Return the index of the first time in ``values`` that is not warm-up.

    ``values`` are times of consecutive steps. The index is the change point in the first half that best divides their
    logarithms into two levels. It is 0 if the first level is less than 5 % higher. A single slow step later on is no change
    point.

    Source: segmentation into two levels, Hinkley 1970; the levels are medians, the costs absolute deviations.
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


def median_of(values: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """Return (median of ``values``, its relative error).

    The error is half the width of the median's 95 % interval, divided by the median; infinite for fewer than three values.
    ``seed`` seeds the bootstrap.

    Source: percentile bootstrap, Efron 1979.
    """
    given = np.asarray(values, dtype=np.float64)
    median = float(np.median(given))
    if len(given) < 3 or not median:
        return median, math.inf
    drawn = np.random.RandomState(seed).randint(0, len(given), (_NUM_RESAMPLES, len(given)))
    low, high = np.quantile(np.median(given[drawn], axis=1), [0.025, 0.975])
    return median, float(high - low) / (2 * median)


@dataclasses.dataclass(frozen=True, slots=True)
class SamplingLimits:
    """Limits that decide when enough steps are timed.

    A window is a number of consecutive steps that are timed together.
    """

    target_half_width: float = 0.015  # of the median's 95 % interval, relative; the measurement ends below it
    min_windows: int = 6  # after warm-up
    max_windows: int = 60  # warm-up included
    min_s: float = 3.0  # seconds of all windows after warm-up
    window_s: float = 0.1  # a window has as many steps as fill this time
    max_s: float = 60.0  # seconds after which no window begins, if there are three windows after warm-up
    min_steps: int = 6  # warm-up included
    first_step: int = 0  # steps before this one, counted from 1, are warm-up


class Sampling:
    """Collects times of steps until enough are timed.

    Steps are timed in windows: several consecutive steps together.
    """

    def __init__(self, limits: SamplingLimits) -> None:
        self._limits = limits
        self._windows: list[tuple[int, float]] = []  # (number of steps, seconds of one step)

    def add(self, num_steps: int, seconds: float) -> None:
        """Add ``num_steps`` consecutive steps that took ``seconds`` together."""
        self._windows.append((num_steps, seconds / num_steps))

    @property
    def num_steps(self) -> int:
        """Number of timed steps, warm-up included."""
        return sum(num_steps for num_steps, _ in self._windows)

    def median(self) -> tuple[float, float]:
        """Return (median seconds of a step after warm-up, its relative error)."""
        return median_of([time_s for _, time_s in self._warm()])

    def mean_s(self) -> float:
        """Return the mean seconds of one step after warm-up.

        Searches compare configurations by the median. The mean includes slow steps, so it predicts the speed of a training.
        """
        warm = self._warm()
        return sum(steps * time_s for steps, time_s in warm) / sum(steps for steps, _ in warm)

    def range_s(self) -> tuple[float, float]:
        """Return (least, most) mean seconds of one step to expect of a training.

        The speed of a machine varies from minute to minute about as much as from window to window. So the range includes 95 %
        of the windows after warm-up, and at least 5 % on both sides of their mean.
        """
        low, high = np.quantile([time_s for _, time_s in self._warm()], _RANGE)
        mean_s = self.mean_s()
        return min(float(low), mean_s / (1 + _LEAST_RANGE)), max(float(high), mean_s / (1 - _LEAST_RANGE))

    def _warm(self) -> list[tuple[int, float]]:
        step, windows = _FIRST_TIMED_STEP, self._windows
        for idx, (num_steps, _) in enumerate(self._windows):
            if step >= self._limits.first_step:
                windows = self._windows[idx:]
                break
            step += num_steps
        return windows[warm_from([time_s for _, time_s in windows]) :]

    def next_steps(self) -> int:
        """Return how many steps to time together next; 0 if enough are timed."""
        limits = self._limits
        if not self._windows:
            return 1
        total_s = sum(steps * time_s for steps, time_s in self._windows)
        if len(self._windows) >= limits.max_windows:
            return 0
        before_first = limits.first_step - _FIRST_TIMED_STEP - self.num_steps
        if before_first > 0 and total_s < limits.max_s:
            return before_first
        warm = self._warm()
        if len(warm) >= 3 and total_s >= limits.max_s:
            return 0
        is_enough = len(warm) >= limits.min_windows and self.num_steps >= limits.min_steps
        is_enough = is_enough and sum(steps * time_s for steps, time_s in warm) >= limits.min_s
        if is_enough and self.median()[1] <= limits.target_half_width:
            return 0
        return max(1, min(round(limits.window_s / max(min(time_s for _, time_s in warm), 1e-6)), 1000))
