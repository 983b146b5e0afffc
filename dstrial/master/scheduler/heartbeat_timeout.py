"""Ends detached runs of which nothing is heard any more."""

from __future__ import annotations

import logging
import time

from dstrial.master.clock import now_us
from dstrial.master.lifecycle import detached_runs
from dstrial.master.store.database import Database

logger = logging.getLogger("dstrial.master.scheduler")

_PERIOD_S = 1.0


class Silence:
    """Looks from time to time for detached runs that have been silent for too long.

    A master that has just started has heard of nobody, and waits as long as for a run that it knows.

    Args:
        database: the store.
        timeout_s: how long a run may be silent.
    """

    def __init__(self, database: Database, timeout_s: float) -> None:
        self._database = database
        self._timeout_s = timeout_s
        self._next_s = time.monotonic() + timeout_s

    def check(self) -> None:
        """End the silent ones, if it is time to look."""
        if time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + _PERIOD_S
        before_us = now_us() - int(self._timeout_s * 1e6)
        with self._database.read() as connection:
            is_any = detached_runs.is_anyone_silent(connection, before_us)
        if is_any:
            count = self._database.write(lambda tx: detached_runs.give_up_silent(tx, before_us))
            logger.warning("%d detached runs are given up: nothing was heard of them", count)
