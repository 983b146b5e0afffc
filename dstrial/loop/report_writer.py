"""Writes reports in a background thread, in order, each report once.

Writing the chief's averages (the record, the sinks, progress, the master) takes longer than many a batch. A failure there is
raised by the loop, on all ranks together, at their next point of agreement. A resume trains and reports again what came after
the last checkpoint.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from dstrial.errors import DstrialError

logger = logging.getLogger("dstrial.loop")

CAPACITY = 32
"""How many jobs may wait; with one more the loop waits, too."""

LOOK_S = 0.05
"""How often the thread looks for something to do, seconds.

Nobody wakes it, unless somebody waits: a thread that is woken takes the lock of Python from the one that trains, in the middle of
its way to the next batch, and often its core, so that training waits for the writing after all.
"""

_SAY_WAITING_S = 30.0

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class _Job:
    run: Callable[[], None]
    is_always_run: bool = False


class ReportWriter:
    """Runs jobs of this rank's loop in a thread, one after the other.

    After the first failure nothing more is written, so that no report stands behind a missing one.

    Args:
        deadline_s: how long the loop waits for the thread.
        capacity: jobs that may be queued.
    """

    def __init__(self, *, deadline_s: float, capacity: int = CAPACITY) -> None:
        self._deadline_s = deadline_s
        self._capacity = capacity
        self._jobs: collections.deque[_Job | None] = collections.deque()
        self._is_awaited = threading.Lock()  # released to wake the thread
        self._is_awaited.acquire()
        self._num_submitted = 0
        self._num_done = 0
        self._has_done = threading.Condition()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._is_raised = False

    # ---- the loop ------------------------------------------------------------------------------------

    def submit(self, job: Callable[[], None]) -> None:
        """Queue a job; wait only if the queue is full.

        Raises:
            DstrialError: there was no room until the deadline.
        """
        self._put(_Job(job))

    def call(self, job: Callable[[], T]) -> T:
        """Run a job on the thread, also after a failure; return its result or raise."""
        outcomes: list[tuple[T | None, BaseException | None]] = []

        def keep() -> None:
            try:
                outcomes.append((job(), None))
            except BaseException as error:  # noqa: BLE001  # raised below, on the thread that asked
                outcomes.append((None, error))

        self._put(_Job(keep, is_always_run=True))
        self.flush()
        ((result, error),) = outcomes
        if error is not None:
            raise error
        return result  # type: ignore[return-value]  # a T, where nothing was raised

    def flush(self) -> None:
        """Wait until all queued jobs are done, or have failed.

        Raises:
            DstrialError: they are not until the deadline.
        """
        self._wait_for(self._num_submitted)

    @property
    def failure(self) -> str | None:
        """The first failure in one line; None if there is none or it has been taken."""
        if self._error is None or self._is_raised:
            return None
        return f"{type(self._error).__name__}: {self._error}".splitlines()[0]

    def take_error(self) -> BaseException | None:
        """Return the first failure, to be raised, once."""
        error = None if self._is_raised else self._error
        self._is_raised = self._is_raised or error is not None
        return error

    def close(self) -> None:
        """Write what is left, and end the thread; log a failure that nobody was told of."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        try:
            self.flush()
        except DstrialError as error:
            logger.error("%s", error)  # whoever hangs there has no traceback
            return
        self._jobs.append(None)
        self._wake()
        thread.join()
        if self.failure is not None:
            logger.error("a report could not be written: %s", self.failure, exc_info=self.take_error())

    def _put(self, job: _Job) -> None:
        if self._num_submitted - self._num_done >= self._capacity:
            self._wait_for(self._num_submitted - self._capacity + 1)
        self._num_submitted += 1
        self._jobs.append(job)
        if self._thread is None:
            # It does not keep the process alive: see ``close``.
            self._thread = threading.Thread(target=self._run, name="dstrial-reports", daemon=True)
            self._thread.start()

    def _wait_for(self, num_done: int) -> None:
        if self._num_done >= num_done:
            return
        self._wake()
        give_up_at_s = time.monotonic() + self._deadline_s
        with self._has_done:
            while self._num_done < num_done:
                left_s = give_up_at_s - time.monotonic()
                if left_s <= 0:
                    raise DstrialError(
                        f"{num_done - self._num_done} reports of metrics and progress are not written after "
                        f"{self._deadline_s:g} s; expected the record and every metric sink to take them. Look at what hangs "
                        "there: a sink of your own, the master, or the disk of the run directory."
                    )
                if not self._has_done.wait(min(left_s, _SAY_WAITING_S)) and left_s > _SAY_WAITING_S:
                    logger.info("waiting for %d reports to be written", num_done - self._num_done)

    def _wake(self) -> None:
        if self._is_awaited.locked():
            self._is_awaited.release()

    # ---- the thread ----------------------------------------------------------------------------------

    def _next_job(self) -> _Job | None:
        while not self._jobs:
            self._is_awaited.acquire(timeout=LOOK_S)
        return self._jobs.popleft()

    def _run(self) -> None:
        while (job := self._next_job()) is not None:
            if self._error is None or job.is_always_run:
                try:
                    job.run()
                except BaseException as error:  # noqa: BLE001  # the boundary of a thread: the loop raises it
                    self._error = error
            del job
            with self._has_done:
                self._num_done += 1
                self._has_done.notify_all()
