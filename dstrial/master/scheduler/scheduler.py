"""The scheduler thread: assigns slots, and reconciles processes with the database.

Every step is idempotent: if the master is killed after a commit but before its effect, the next master finds the row and
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
from dstrial.master.lifecycle.storages import StorageWait
from dstrial.master.scheduler.dispatcher import Dispatcher
from dstrial.master.scheduler.janitor import Janitor
from dstrial.master.scheduler.reconciler import Reconciler, release
from dstrial.master.scheduler.retries import Retries
from dstrial.master.store import allocations as allocation_rows
from dstrial.master.store.database import Database, SqlError, Transaction

if TYPE_CHECKING:
    from dstrial.master.services import Services

logger = logging.getLogger("dstrial.master.scheduler")

_DRAIN_POLL_S = 0.05  # interval of checks at shutdown whether all allocations have ended
_IDLE_TICK_S = 1.0  # longest interval of iterations
_HEARTBEAT_POLL_S = 1.0  # interval of checks for detached runs without heartbeats
_CLOCK_JUMP_S = 2.0  # minimum change against the monotonic clock that counts as a jump
_OUTPUT_GRACE_S = 15.0  # timeout at shutdown for storing the output of killed allocations
_THREAD = "scheduler"  # key of `_retries` for failures of an iteration


class Scheduler:
    """Runs the dispatcher and reconciler in one thread, and the janitor in another."""

    def __init__(self, services: Services, retries: Retries | None = None) -> None:
        self._services = services
        self._retries = retries or Retries()  # keys: allocation ids, trial ids and _THREAD
        self._database = services.database
        self._event = services.pubsub.listen("scheduler")
        self._backend = services.backend
        self._janitor = Janitor(
            services.database,
            services.pubsub,
            services.settings.log_retention_days,
            storages=services.storages,
        )
        self._heartbeat_timeout = _HeartbeatTimeout(services.database, services.settings.detached_timeout_s)
        self._directory = services.state_dir / "allocations"
        storage_wait = StorageWait(services.database, services.storages)
        self._reconciler = Reconciler(services, storage_wait, self._retries)
        self._dispatcher = Dispatcher(services, self._reconciler, storage_wait, self._retries)
        self._version = -1  # the topic's version at the last reconciliation
        self._is_begun = False
        self._is_stopping = False
        self._is_killing = False
        self._is_without_rows = False
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

        If ``graceful``, trials first save a checkpoint, and are killed after ``timeout_s``; meanwhile another thread may call
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
            give_up_at_s = time.monotonic() + _OUTPUT_GRACE_S
            while self._stop_allocations() and (time.monotonic() < give_up_at_s or self._has_processes()):
                self._event.set()
                time.sleep(_DRAIN_POLL_S)
            self._is_stopping = True
            self._event.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._janitor.stop()

    def _stop_allocations(self) -> bool:
        """Stop or kill every allocation; return whether any still runs."""
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
            return self._release_without_rows(error)

    def _release_without_rows(self, error: Exception) -> bool:
        """Kill allocations without writing to the database; return whether any still runs."""
        if not self._is_without_rows:
            self._is_without_rows = True
            logger.error("allocations are killed without a record in the database: %s", error)
        # A graceful stop kills nothing: trials may still save. The next master treats killed trials as lost: no restart.
        if self._is_killing:
            with self._database.read() as connection:
                live = allocation_rows.all_live(connection)
            for row in live:
                self._backend.kill(run_of(row), leaves_record=False)
        return self._has_processes()

    def _has_processes(self) -> bool:
        with self._database.read() as connection:
            live = allocation_rows.all_live(connection)
        return any(self._backend.observe(run_of(row)) is None for row in live)

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
                self._retries.record_failure(_THREAD)
                # Retry at least as often as an idle master iterates.
                wait_s = min(self._retries.delay_s(_THREAD), _IDLE_TICK_S)
            else:
                self._services.scheduler_problem = ""
                self._retries.forget(_THREAD)
            self._event.wait(wait_s)
            self._event.clear()

    def _tick(self) -> float:
        """Run one iteration of the scheduler; return the seconds until the next."""
        self._services.record_scheduler_step("reading the allocations")
        version = self._services.pubsub.version("scheduler")  # before reading rows, to miss no change
        with self._database.read() as connection:
            live = allocation_rows.all_live(connection)
        wait_s = min(self._reconciler.poll(live, is_all_due=version != self._version), _IDLE_TICK_S)
        self._version = version
        self._services.record_scheduler_step("assigning slots")
        if self._dispatcher.poll():
            wait_s = 0.0
        self._heartbeat_timeout.check()
        self._backend.poll(is_busy=bool(live))
        self._services.record_scheduler_step("waiting")
        return wait_s

    def _remove_stale(self, live: set[str]) -> None:
        for directory in self._directory.iterdir():
            if directory.name not in live:
                local.kill(local.find(directory), directory)
                local.remove(directory)


class _HeartbeatTimeout:
    """Ends detached runs that have sent no heartbeat for ``timeout_s``."""

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
        if abs(lead_s - known_s) > _CLOCK_JUMP_S:
            self._next_s = time.monotonic() + self._timeout_s
            return
        self._next_s = time.monotonic() + _HEARTBEAT_POLL_S
        before_us = now_us() - int(self._timeout_s * 1e6)
        with self._database.read() as connection:
            is_any = detached_runs.has_silent_runs(connection, before_us)
        if is_any:
            count = self._database.write(lambda tx: detached_runs.give_up_silent(tx, before_us))
            logger.warning("%d detached runs without heartbeats are ended", count)


def _lead_of_wall_clock_s() -> float:
    """Return wall-clock time minus monotonic time; a change means a jump or suspend."""
    return now_us() / 1e6 - time.monotonic()
