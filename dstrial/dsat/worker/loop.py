"""The worker's loop on rank 0: take an order, measure, answer, until the end."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from dstrial.dsat.core.outcome import Measured, Outcome, score
from dstrial.dsat.worker.messages import Task, TaskResult
from dstrial.dsat.worker.ranks import RankPool
from dstrial.dsat.worker.transport import Transport
from dstrial.local.measuring_variables import BENCHMARK_KEY, SETTINGS_KEY

logger = logging.getLogger("dstrial.dsat")

IDLE_S = 900.0
"""A worker to which nobody has given an order for so long ends; a search that goes on later starts another one."""

# Number of a task that is measured again for comparison; no other task has it.
_AGAIN = 0


def run_worker(transport: Transport, ranks: RankPool, *, idle_s: float = IDLE_S) -> str:
    """Measure tasks until the search is over; return why the worker ends."""
    answered = transport.answered_tasks()
    incumbent = Incumbent()
    busy_at_s = time.monotonic()
    while True:
        queue = transport.task_queue()
        if queue.results is not None:
            if queue.results:
                transport.keep(queue.results)
            return "the search is over"
        if transport.should_stop():
            return "its slots are wanted back"
        order = next((one for one in queue.orders if one.number not in answered), None)
        if order is not None:
            answer = _measured(order, ranks, incumbent, lambda: _is_given_up(transport))
            if answer is not None:
                answered.add(order.number)
                transport.report(answer)
            busy_at_s = time.monotonic()
        elif time.monotonic() - busy_at_s > idle_s:
            return f"nobody has asked for anything for {idle_s:.0f} s"
        else:
            time.sleep(transport.poll_s)


def _is_given_up(transport: Transport) -> bool:
    """Return whether a measurement is to end early: nobody waits, or slots are wanted."""
    return transport.should_stop() or transport.task_queue().results is not None


def _measured(
    order: Task, ranks: RankPool, incumbent: Incumbent, is_given_up: Callable[[], bool]
) -> TaskResult | None:
    """Return a task's result; None if it was given up."""
    if order.best is not None:
        incumbent.consider(order.best["hparams"], Measured(order.best["metrics"]), order.metric)
    logger.info("order %d begins", order.number)
    answer = ranks.measure(order.number, order.hparams, order.deadline_s, is_given_up)
    if answer is None:
        return None
    logger.info(
        "order %d: %.2f s, ranks %d %s", order.number, answer.seconds, answer.generation, answer.respawned
    )
    outcome, respawned, seconds = answer.outcome, answer.respawned, answer.seconds
    if (
        incumbent.measured is not None
        and incumbent.hparams is not None
        and isinstance(outcome, Measured)
        and incumbent.is_worth_measuring_again(outcome, order.metric)
    ):
        again = ranks.measure(_AGAIN, _without_extras(incumbent.hparams), order.deadline_s, is_given_up)
        if again is None:
            return None
        if isinstance(again.outcome, Measured):
            outcome = without_drift(outcome, drift_between(incumbent.measured, again.outcome))
        seconds += again.seconds
        respawned = respawned or again.respawned
    incumbent.consider(order.hparams, outcome, order.metric)
    return TaskResult(order.number, outcome, seconds, answer.generation, respawned, answer.details)


def _without_extras(hparams: Mapping[str, Any]) -> dict[str, Any]:
    """Return hyperparameters that measure the configuration, not the machine."""
    asked = {
        name: value for name, value in (hparams.get(SETTINGS_KEY) or {}).items() if name != BENCHMARK_KEY
    }
    return {**hparams, SETTINGS_KEY: asked}


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

    A machine gets slower or faster within a search: heat, clocks, neighbours. A result that comes near the best one or beats it
    has the best one measured again. If its two measurements disagree by more than their intervals, the times of the new result
    are corrected. Only ``end_to_end_throughput`` stays: it says what a training will do, not which configuration is better.
    """

    hparams: dict[str, Any] | None = None
    measured: Measured | None = None  # its first measurement

    def is_worth_measuring_again(self, outcome: Outcome, metric: str) -> bool:
        """Return whether a result is so near that the machine's drift could decide."""
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
