"""Ends detached runs without heartbeats."""

from __future__ import annotations

import logging
import time

from dstrial.master.clock import now_us
from dstrial.master.lifecycle import detached_runs
from dstrial.master.store.database import Database

logger = logging.getLogger("dstrial.master.scheduler")

_PERIOD_S = 1.0
_JUMP_S = 2.0


class HeartbeatTimeout:
    """Looks from time to time for detached runs that have been silent for too long.

    The time begins anew when the master starts, after a jump of the wall clock, which heartbeats are noted by, and after the
    machine was suspended.
    """

    def __init__(self, database: Database, timeout_s: float) -> None:
        self._database = database
        self._timeout_s = timeout_s
        self._next_s = time.monotonic() + timeout_s
        self._lead_s = _lead_of_wall_clock_s()

    def check(self) -> None:
        if time.monotonic() < self._next_s:
            return
        lead_s, known_s = _lead_of_wall_clock_s(), self._lead_s
        self._lead_s = lead_s
        if abs(lead_s - known_s) > _JUMP_S:
            self._next_s = time.monotonic() + self._timeout_s
            return
        self._next_s = time.monotonic() + _PERIOD_S
        before_us = now_us() - int(self._timeout_s * 1e6)
        with self._database.read() as connection:
            is_any = detached_runs.has_silent_runs(connection, before_us)
        if is_any:
            count = self._database.write(lambda tx: detached_runs.give_up_silent(tx, before_us))
            logger.warning("%d detached runs are given up: nothing was heard of them", count)


def _lead_of_wall_clock_s() -> float:
    """Return by how much the wall clock is ahead of the monotonic one."""
    return now_us() / 1e6 - time.monotonic()
