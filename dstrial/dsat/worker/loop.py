"""The worker's loop on rank 0: take an order, measure, answer, until the end."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from dstrial.dsat.core.outcome import Measured
from dstrial.dsat.worker.drift import Incumbent, drift_between, without_drift
from dstrial.dsat.worker.messages import Answer, Order
from dstrial.dsat.worker.ranks import Crew
from dstrial.dsat.worker.transport import Mailbox
from dstrial.local.measuring_variables import BENCHMARK_KEY, SETTINGS_KEY

logger = logging.getLogger("dstrial.dsat")

IDLE_S = 900.0
"""A worker to which nobody has given an order for so long ends; a search that goes on later starts another one."""

# Of an order that is measured again for comparison; no order has it.
_AGAIN = 0


def work(mailbox: Mailbox, crew: Crew, *, idle_s: float = IDLE_S) -> str:
    """Measure what is ordered.

    Args:
        mailbox: where orders come from.
        crew: who measures.
        idle_s: end after so many seconds without an order.

    Returns:
        Why it ended, one line.

    Raises:
        RankError: a slot is lost.
    """
    answered = mailbox.answered()
    incumbent = Incumbent()
    busy_at_s = time.monotonic()
    while True:
        book = mailbox.book()
        if book.results is not None:
            if book.results:
                mailbox.keep(book.results)
            return "the search is over"
        if mailbox.should_stop():
            return "its slots are wanted back"
        order = next((one for one in book.orders if one.number not in answered), None)
        if order is not None:
            answer = _measured(order, crew, incumbent, lambda: _is_given_up(mailbox))
            if answer is not None:
                answered.add(order.number)
                mailbox.answer(answer)
            busy_at_s = time.monotonic()
        elif time.monotonic() - busy_at_s > idle_s:
            return f"nobody has asked for anything for {idle_s:.0f} s"
        else:
            time.sleep(mailbox.poll_s)


def _is_given_up(mailbox: Mailbox) -> bool:
    """Say whether a measurement is to end early: nobody waits, or slots are wanted."""
    return mailbox.should_stop() or mailbox.book().results is not None


def _measured(
    order: Order, crew: Crew, incumbent: Incumbent, is_given_up: Callable[[], bool]
) -> Answer | None:
    """Return an order's answer; None if it was given up."""
    if order.best is not None:
        incumbent.consider(order.best["hparams"], Measured(order.best["metrics"]), order.metric)
    logger.info("order %d begins", order.number)
    answer = crew.measure(order.number, order.hparams, order.deadline_s, is_given_up)
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
        again = crew.measure(_AGAIN, _without_extras(incumbent.hparams), order.deadline_s, is_given_up)
        if again is None:
            return None
        if isinstance(again.outcome, Measured):
            outcome = without_drift(outcome, drift_between(incumbent.measured, again.outcome))
        seconds += again.seconds
        respawned = respawned or again.respawned
    incumbent.consider(order.hparams, outcome, order.metric)
    return Answer(order.number, outcome, seconds, answer.generation, respawned, answer.details)


def _without_extras(hparams: Mapping[str, Any]) -> dict[str, Any]:
    """Return hyperparameters that measure the configuration, not the machine."""
    asked = {
        name: value for name, value in (hparams.get(SETTINGS_KEY) or {}).items() if name != BENCHMARK_KEY
    }
    return {**hparams, SETTINGS_KEY: asked}
