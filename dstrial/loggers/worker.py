"""One logger's thread: takes reports from a bounded queue, and reports losses."""

from __future__ import annotations

import collections
import logging
import re
import threading
import time
from collections.abc import Sequence

from dstrial.config.experiment_config.loggers import how_to_install
from dstrial.loggers.logger import FinalState, LoggedRun, Logger, Report

logger = logging.getLogger("dstrial.loggers")

CAPACITY = 10_000  # queued reports; further ones are lost
# The thread polls; waking it per report would cost the loop time (see ``dstrial.loop.report_writer``).
LOOK_S = 1.0


_PASSWORD = re.compile(r"://[^/\s@]*@")


class LoggerThread:
    """Runs one logger behind training, without raising its errors.

    Only ``wait_begun`` and ``wait_ended`` block.
    """

    def __init__(self, name: str, made: Logger, run: LoggedRun, *, capacity: int = CAPACITY) -> None:
        self.name = name
        self._logger = made
        self._run = run
        self._capacity = capacity
        self._reports: collections.deque[Report] = collections.deque()
        self._begun, self._ended = threading.Event(), threading.Event()
        self._is_over = threading.Event()
        self._state: FinalState = "completed"
        self._is_off = False
        self._has_warned = False
        self._num_given = self._num_kept = 0
        self._under_way: Sequence[Report] = ()
        # It does not keep the process alive.
        self._thread = threading.Thread(target=self._work, name=f"dstrial-{name}", daemon=True)

    # ---- the run ---------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def wait_begun(self, deadline_s: float) -> None:
        """Wait until the logger has begun or failed, up to a monotonic time."""
        if not self._begun.wait(max(deadline_s - time.monotonic(), 0.0)):
            logger.warning(
                "logger %s has not begun yet; training goes on, and reports wait for it (up to %d)",
                self.name,
                self._capacity,
            )

    def report(self, report: Report) -> None:
        self._num_given += 1
        if self._is_off:
            return
        if len(self._reports) >= self._capacity:
            self._warn(f"takes nothing, and {self._capacity} reports wait already", [report])
            return
        self._reports.append(report)

    def end(self, state: FinalState) -> None:
        self._state = state
        self._is_over.set()

    def wait_ended(self, deadline_s: float) -> None:
        """Wait until the logger has ended, up to a monotonic time; warn of lost reports."""
        begun_s = time.monotonic()
        is_ended = self._ended.wait(max(deadline_s - begun_s, 0.0))
        num_lost = self._num_given - self._num_kept
        if is_ended:
            self._thread.join()
            if num_lost:
                logger.warning("logger %s: %d of %d reports are lost", self.name, num_lost, self._num_given)
            return
        left = [*self._under_way, *self._reports]
        what = (
            f"{num_lost} of {self._num_given} reports are lost"
            if num_lost
            else "the end of the run may be lost"
        )
        logger.warning(
            "logger %s has not ended after %.0f s and is left behind: %s%s",
            self.name,
            time.monotonic() - begun_s,
            what,
            f" ({_batches(left)})" if left else "",
        )

    # ---- the thread ------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            where = self._logger.begin(self._run)
            logger.info("logger %s: run %s (%s)", self.name, self._run.name, where)
        except BaseException as error:  # noqa: BLE001  # the boundary of a thread
            self._is_off = self._has_warned = True
            self._reports.clear()
            logger.warning(
                "logger %s cannot begin: %s. Nothing of this run is kept there; training goes on.",
                self.name,
                _described(error, self.name),
            )
        self._begun.set()
        while not (self._is_over.wait(LOOK_S) and not self._reports):
            if self._reports:
                self._log()
        if not self._is_off:
            try:
                self._logger.end(self._state)
            except BaseException as error:  # noqa: BLE001  # the boundary of a thread
                logger.warning("logger %s cannot end the run: %s", self.name, _described(error, self.name))
        self._ended.set()

    def _log(self) -> None:
        reports = [self._reports.popleft() for _ in range(len(self._reports))]
        self._under_way = reports
        try:
            self._logger.log(reports)
            self._num_kept += len(reports)
        except BaseException as error:  # noqa: BLE001  # the boundary of a thread
            self._warn(_described(error, self.name), reports)
        self._under_way = ()

    def _warn(self, why: str, lost: Sequence[Report]) -> None:
        """Warn once of lost reports; ``wait_ended`` has their number."""
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "logger %s: %s. Lost: %s, and what fails like it from now on; training goes on.",
                self.name,
                why,
                _batches(lost),
            )


def _batches(reports: Sequence[Report]) -> str:
    first, last = reports[0].batches_trained, reports[-1].batches_trained
    return f"the report of batch {first}" if first == last else f"the reports of batches {first} to {last}"


def _described(error: BaseException, name: str) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name == name:
        return f"{name} is not installed. {how_to_install(name)}"
    text = _PASSWORD.sub("://", f"{type(error).__name__}: {error}".strip())
    return " ".join(text.split())[:500].rstrip(".")
