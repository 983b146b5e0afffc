"""Compare with the best configuration as the machine is now. Pure.

Not as it was when the best one was measured.

A machine gets slower or faster within a search: heat, clocks, neighbours. After each measurement that comes near the best
one or beats it, the best one is measured again, and where the two measurements of it disagree by more than their
intervals, the new one's times are brought to the time of the first. Only ``end_to_end_throughput`` stays what was seen: it
says what a training will do, not which configuration is better.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from dstrial.dsat.core.outcome import Measured, Outcome, score

_NEAR = 0.10
_RATES = (
    "throughput",
    "bare_throughput",
    "FLOPS_per_gpu",
    "hardware_FLOPS_per_gpu",
)
_TIMES = ("latency", "latency_low", "latency_high", "forward", "backward", "step")


@dataclasses.dataclass(slots=True)
class Incumbent:
    """The best configuration that a worker has measured.

    Attributes:
        hparams: of it; None before the first.
        measured: what was measured at first.
    """

    hparams: dict[str, Any] | None = None
    measured: Measured | None = None

    def is_worth_measuring_again(self, outcome: Outcome, metric: str) -> bool:
        """Say whether a result is so near that the machine's drift could decide."""
        mine = None if self.measured is None else score(self.measured, metric)
        theirs = score(outcome, metric)
        if mine is None or theirs is None:
            return False
        return theirs >= mine - _NEAR * abs(mine)

    def consider(self, hparams: dict[str, Any], outcome: Outcome, metric: str) -> None:
        """Take a result that may be the best one from now on."""
        theirs = score(outcome, metric)
        mine = None if self.measured is None else score(self.measured, metric)
        if isinstance(outcome, Measured) and theirs is not None and (mine is None or theirs > mine):
            self.hparams, self.measured = hparams, outcome


def drift_between(before: Measured, again: Measured) -> float:
    """Return the ratio of latencies if the machine slowed; 1.0 within the intervals."""
    first, second = before.value("latency"), again.value("latency")
    if not first or not second:
        return 1.0
    ratio = second / first
    known = sum(one.value("half_width") or 0.0 for one in (before, again))
    return ratio if abs(ratio - 1.0) > known else 1.0


def without_drift(measured: Measured, drift: float) -> Measured:
    """Return a measurement as without the slowdown ``drift``, which it then names."""
    metrics: Mapping[str, float] = measured.metrics
    corrected = {
        name: value * drift if name in _RATES else value / drift if name in _TIMES else value
        for name, value in metrics.items()
    }
    return Measured({**corrected, "drift": drift})
