"""The scheduler thread: assigns slots, and reconciles processes with the database.

Every step is idempotent. If the master is killed after a commit but before its effect, the next master finds the row and
repeats the step. An error of one trial never stops the thread.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from dstrial.errors import MasterError
from dstrial.master.backends import local
from dstrial.master.backends.backend import run_of
from dstrial.master.clock import now_us
from dstrial.master.lifecycle import detached_runs
from dstrial.master.scheduler.backoff import Backoff
from dstrial.master.scheduler.dispatcher import Dispatcher
from dstrial.master.scheduler.janitor import Janitor
from dstrial.master.scheduler.reconciler import Reconciler, release
from dstrial.master.store import allocations as allocation_rows
from dstrial.master.store.database import SqlError, Transaction

if TYPE_CHECKING:
    from dstrial.master.services import Services

logger = logging.getLogger("dstrial.master.scheduler")

_DRAIN_POLL_S = 0.05  # interval of checks at shutdown whether all allocations have ended
_IDLE_TICK_S = 1.0  # longest interval of iterations
_CLOCK_JUMP_S = 2.0  # minimum change against the monotonic clock that counts as a jump
_KILL_TIMEOUT_S = 15.0  # timeout at shutdown for killed allocations to end, and for storing their output
_THREAD = "scheduler"  # key of `_backoff` for failures of an iteration


class Scheduler:
    """Runs the dispatcher and reconciler in one thread, and the janitor in another."""

    def __init__(self, services: Services, backoff: Backoff | None = None) -> None:
        self._services = services
        self._backoff = backoff or Backoff()  # keys: allocation ids, trial ids and _THREAD
        self._database = services.database
        self._event = services.pubsub.listen("scheduler")
        self._backend = services.backend
        self._janitor = Janitor(
            services.database,
            services.pubsub,
            services.storages,
            services.state_dir / "venvs",
            services.settings.log_retention_days,
        )
        self._next_silence_check_s = time.monotonic() + services.settings.detached_timeout_s
        self._lead_s = _lead_of_wall_clock_s()
        self._directory = services.state_dir / "allocations"
        self._reconciler = Reconciler(services, self._backoff)
        self._dispatcher = Dispatcher(services, self._reconciler, self._backoff)
        self._version = -1  # the topic's version at the last reconciliation
        self._is_begun = False
        self._is_stopping = False
        self._is_killing = False
        self._thread = threading.Thread(target=self._run, name="dstrial-scheduler", daemon=True)

    def start(self) -> None:
        """Adopt running allocations of an earlier master, and start the threads."""
        self._directory.mkdir(mode=0o700, exist_ok=True)
        with self._database.read() as connection:
            live = allocation_rows.all_live(connection)
        self._reconciler.adopt(live)
        self._remove_stale({row.id for row in live})
        self._janitor.start()
        self._thread.start()

    def stop(self, *, graceful: bool, timeout_s: float) -> None:
        """Stop all allocations and the threads; experiments keep their state.

        If ``graceful``, trials first save a checkpoint, and are killed after ``timeout_s``. Meanwhile another thread may call
        ``stop(graceful=False)`` to kill them immediately.
        """
        if not graceful:
            self._is_killing = True
        if not self._dispatcher.is_draining:
            self._dispatcher.is_draining = True
            deadline_s = time.monotonic() + timeout_s
            while self._stop_allocations() and not self._is_killing and time.monotonic() < deadline_s:
                self._event.set()
                time.sleep(_DRAIN_POLL_S)
            self._is_killing = True
            give_up_at_s = time.monotonic() + _KILL_TIMEOUT_S
            while self._stop_allocations() and time.monotonic() < give_up_at_s:
                self._event.set()
                time.sleep(_DRAIN_POLL_S)
            self._is_stopping = True
            self._event.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._janitor.stop()

    def _stop_allocations(self) -> bool:
        """Request a stop of every allocation; return whether any still runs.

        If ``_is_killing``, request a kill instead.
        """
        if not self._is_begun:  # not connected to the nodes: the next master adopts all allocations
            return not self._services.scheduler_problem
        is_kill = self._is_killing

        def stop(tx: Transaction) -> bool:
            live = allocation_rows.all_live(tx.connection)
            for row in live:
                wants = row.kill_us is None if is_kill else row.preempt_us is None and row.kill_us is None
                if wants:
                    release(tx, row, "the master is going down", is_kill=is_kill)
            return bool(live)

        try:
            return self._database.write(stop)
        except (SqlError, MasterError) as error:
            logger.error("the stop of the allocations cannot be written: %s", error)
            return self._kill_without_rows()

    def _kill_without_rows(self) -> bool:
        """Kill all allocations without a write to the database, which has failed.

        Kills none in a graceful stop. Returns whether any allocation still runs.
        """
        # A graceful stop kills nothing: trials may still save. The next master treats killed trials as lost: no restart.
        with self._database.read() as connection:
            runs = [run_of(row) for row in allocation_rows.all_live(connection)]
        for run in runs if self._is_killing else ():
            self._backend.kill(run, leaves_record=False)
        return any(self._backend.observe(run) is None for run in runs)

    def _run(self) -> None:
        while not self._is_stopping:
            try:
                if not self._is_begun:
                    self._services.record_scheduler_step("connecting to the nodes")
                    self._backend.begin()
                    self._is_begun = True
                wait_s = self._tick()
            except Exception as error:
                logger.exception("the scheduler failed; retrying")
                self._services.scheduler_problem = str(error)
                self._backoff.record_failure(_THREAD)
                # Retry at least as often as an idle master iterates.
                wait_s = min(self._backoff.delay_s(_THREAD), _IDLE_TICK_S)
            else:
                self._services.scheduler_problem = ""
                self._backoff.forget(_THREAD)
            self._event.wait(wait_s)
            self._event.clear()

    def _tick(self) -> float:
        """Run one iteration of the scheduler; return the seconds until the next."""
        self._services.record_scheduler_step("reading the allocations")
        version = self._services.pubsub.version("scheduler")  # before reading rows, to miss no change
        with self._database.read() as connection:
            live = allocation_rows.all_live(connection)
        wait_s = min(self._reconciler.poll(live, is_due=version != self._version), _IDLE_TICK_S)
        self._version = version
        self._services.record_scheduler_step("assigning slots")
        if self._dispatcher.poll():
            wait_s = 0.0
        self._end_silent_runs()
        self._backend.poll(is_busy=bool(live))
        self._services.record_scheduler_step("waiting")
        return wait_s

    def _end_silent_runs(self) -> None:
        """End detached runs that have sent no heartbeat for ``detached_timeout_s``.

        After a jump of the wall clock, wait for this time before the next check.
        """
        if time.monotonic() < self._next_silence_check_s:
            return
        lead_s, known_s = _lead_of_wall_clock_s(), self._lead_s
        self._lead_s = lead_s
        if abs(lead_s - known_s) > _CLOCK_JUMP_S:
            self._next_silence_check_s = time.monotonic() + self._services.settings.detached_timeout_s
            return
        self._next_silence_check_s = time.monotonic() + _IDLE_TICK_S
        before_us = now_us() - self._services.settings.detached_timeout_s * 1_000_000
        with self._database.read() as connection:
            is_any = detached_runs.has_silent_runs(connection, before_us)
        if is_any:
            count = self._database.write(lambda tx: detached_runs.give_up_silent(tx, before_us))
            logger.warning("%d detached runs without heartbeats are ended", count)

    def _remove_stale(self, live: set[str]) -> None:
        """Kill the processes and delete the directories of allocations not in ``live``."""
        for directory in self._directory.iterdir():
            if directory.name not in live:
                local.kill(local.find(directory), directory)
                local.remove(directory)


def _lead_of_wall_clock_s() -> float:
    """Return wall-clock time minus monotonic time; a change means a jump or suspend."""
    return now_us() / 1e6 - time.monotonic()
