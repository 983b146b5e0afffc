"""Measure trials in living workers: orders go out, answers come, ranks stay.

A worker is found again by a search that was killed: its orders and answers are where it left them.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from dstrial.dsat.backends.base import Ended
from dstrial.dsat.backends.trial_spec import TrialSpec
from dstrial.dsat.config import SearchConfig
from dstrial.dsat.core.outcome import Failure, FailureKind, failure_from_log
from dstrial.dsat.worker.messages import Task, TaskQueue, TaskResult

logger = logging.getLogger("dstrial.dsat")

_KEEP_S = 60.0
# Grace period in which a new worker may get its slots before the wait is logged.
_TELL_WAITING_S = 15.0


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerExit:
    exit_code: int | None = None  # of its launcher, where it is known
    lines: Sequence[str] = ()  # the end of its output
    is_canceled: bool = False  # somebody ended it on purpose

    @property
    def reason(self) -> str:
        """The last line of its output that is not empty, or its exit code."""
        said = next((line.strip() for line in reversed(self.lines) if line.strip()), "")
        return said[-200:] or f"exit code {self.exit_code}"


class WorkerPlacement(Protocol):
    """Where workers run. Workers are numbered from 1.

    Attributes:
        shows_reports: whether others can see the report in what is published.
    """

    shows_reports: bool

    @property
    def num_parallel(self) -> int:
        """How many workers do not disturb each other."""

    def find_running(self, worker: int) -> dict[str, Any] | None:
        """Return the handle of a living worker of an earlier process; None without."""

    def start(self, worker: int) -> dict[str, Any]:
        """Start a worker; return its handle, JSON values."""

    def task_queue(self, worker: int) -> TaskQueue:
        """Return the queue that was last sent to a worker."""

    def send(self, worker: int, queue: TaskQueue) -> None:
        """Replace the queue of a worker."""

    def publish(self, worker: int, queue: TaskQueue) -> bool:
        """Replace a queue for people who look on unless that blocks; return whether it is."""

    def results(self, worker: int) -> list[TaskResult]:
        """Return all results of a worker so far."""

    def why_waiting(self, worker: int) -> str:
        """Return why a worker has no slots now; empty if it has."""

    def exit_of(self, worker: int) -> WorkerExit | None:
        """Return how a worker has ended; None while it lives or that is not known."""

    def kill(self, worker: int) -> None:
        """End a worker at once."""

    def describe(self) -> str:
        """Return where workers run, for a person."""


@dataclasses.dataclass(slots=True)
class _Worker:
    number: int
    handle: dict[str, Any]
    orders: dict[int, Task] = dataclasses.field(default_factory=dict)
    next_order: int = 1
    since_s: float = 0.0
    has_had_slots: bool = False
    waiting_since_s: float | None = None
    told_waiting: str = ""


class WorkerBackend:
    """Hands each trial to an idle worker, and starts workers as they are needed."""

    keeps_deadlines = True

    def __init__(self, settings: SearchConfig, place: WorkerPlacement) -> None:
        self._settings = settings
        self._place = place
        self._workers: dict[int, _Worker] = {}
        self._has_looked = False
        self._ended: list[Ended] = []
        self._ordered_again: set[int] = set()
        self._report: Mapping[str, Any] | None = None
        self.shows_reports = place.shows_reports

    @property
    def num_parallel(self) -> int:
        return self._place.num_parallel

    def describe(self) -> str:
        return f"{self._place.describe()}, in ranks that live on from one trial to the next"

    def start(self, spec: TrialSpec) -> dict[str, Any]:
        worker = self._worker_with(spec.trial_id)
        if worker is None:
            worker = self._free_worker()
            flags = self._settings.flags
            number = worker.next_order
            order = Task(
                number,
                spec.trial_id,
                spec.hparams,
                spec.deadline_s or flags.trial_timeout,
                flags.metric,
                None if spec.best is None else {"hparams": spec.best[0], "metrics": spec.best[1]},
            )
            self._place.send(worker.number, self._queue_of(worker, order))
            worker.next_order += 1
            worker.orders[number] = order
            worker.since_s = time.time()
        return {"worker": worker.number, **worker.handle}

    def adopt(self, spec: TrialSpec, handle: Mapping[str, Any]) -> bool:
        del handle
        return self._worker_with(spec.trial_id) is not None

    def poll(self) -> list[Ended]:
        ended, self._ended = self._ended, []
        for worker in list(self._workers.values()):
            if not worker.orders:
                continue
            self._note_slots(worker)
            # Read before the results, so that no result that arrives in between is lost.
            gone = self._place.exit_of(worker.number)
            for answer in self._place.results(worker.number):
                order = worker.orders.pop(answer.number, None)
                if order is not None:
                    ended.append(Ended(order.trial_id, answer.outcome, answer.seconds))
            if gone is not None:
                ended += self._requeue_lost_worker(worker, gone)
        return ended

    def running_s(self, trial_id: int) -> float:
        worker = self._worker_of(trial_id)
        return 0.0 if worker is None or not worker.since_s else time.time() - worker.since_s

    def kill(self, trial_id: int) -> None:
        """End the worker that has the task."""
        worker = self._worker_of(trial_id)
        if worker is not None:
            del self._workers[worker.number]
            self._place.kill(worker.number)

    def publish(self, report: Mapping[str, Any]) -> bool:
        self._report = report
        worker = min(self._workers, default=None)
        return worker is None or self._place.publish(worker, self._queue_of(self._workers[worker]))

    def finish(self, results: Mapping[str, str]) -> None:
        """End the workers; the first one keeps the search's files."""
        # A resumed search that is already finished may have a worker that waits.
        self._look()
        for worker in list(self._workers.values()):
            if why := self._place.why_waiting(worker.number):
                logger.warning("worker %d is ended, for it has no slots (%s)", worker.number, why)
                self._forget(worker, is_alive=True)
                continue
            # The worker abandons a measurement in progress.
            worker.orders.clear()
            self._place.send(worker.number, TaskQueue(results=results))
            results = {}
        give_up_at_s = time.monotonic() + _KEEP_S
        while self._workers and time.monotonic() < give_up_at_s:
            for worker in list(self._workers.values()):
                if self._place.exit_of(worker.number) is not None:
                    self._forget(worker)
            time.sleep(0.1)

    def close(self) -> None:
        for worker in list(self._workers):
            del self._workers[worker]
            self._place.kill(worker)

    # ---- machinery -------------------------------------------------------------------------------

    def _requeue_lost_worker(self, worker: _Worker, gone: WorkerExit) -> list[Ended]:
        """Requeue a lost worker's trial, once: the configuration may be innocent."""
        del self._workers[worker.number]
        ended = []
        again = []
        for order in worker.orders.values():
            if gone.is_canceled or order.trial_id in self._ordered_again:
                ended.append(Ended(order.trial_id, _failure_of(gone)))
            else:
                again.append(order)
        if again:
            logger.warning(
                "worker %d has ended (%s); another one takes its place", worker.number, gone.reason
            )
            self._ordered_again.update(order.trial_id for order in again)
            fresh = self._free_worker()
            fresh.orders = {order.number: order for order in again}
            fresh.next_order = 1 + max(fresh.orders)
            fresh.since_s = time.time()
            self._place.send(fresh.number, self._queue_of(fresh))
        return ended

    def _note_slots(self, worker: _Worker) -> None:
        """Stop a worker's clock while others have its slots, and log why."""
        why = self._place.why_waiting(worker.number)
        now_s = time.time()
        if not why:
            if worker.told_waiting:
                logger.warning("worker %d has its slots", worker.number)
            worker.has_had_slots, worker.waiting_since_s, worker.told_waiting = True, None, ""
            return
        worker.since_s = now_s
        if worker.waiting_since_s is None:
            worker.waiting_since_s = now_s
        is_long = worker.has_had_slots or now_s - worker.waiting_since_s > _TELL_WAITING_S
        if is_long and worker.told_waiting != why:
            logger.warning("worker %d waits for slots: %s", worker.number, why)
            worker.told_waiting = why

    def _forget(self, worker: _Worker, *, is_alive: bool = False) -> None:
        del self._workers[worker.number]
        if is_alive:
            self._place.kill(worker.number)

    def _queue_of(self, worker: _Worker, *more: Task) -> TaskQueue:
        orders = (*(worker.orders[number] for number in sorted(worker.orders)), *more)
        return TaskQueue(orders, report=self._report if worker.number == min(self._workers) else None)

    def _look(self) -> None:
        """Find the workers that an earlier process of this search has left, once."""
        if self._has_looked:
            return
        self._has_looked = True
        for number in range(1, max(self._settings.options.num_parallel, 1) + 1):
            handle = self._place.find_running(number)
            if handle is not None:
                worker = self._workers[number] = _Worker(number, handle)
                queue = self._place.task_queue(number)
                worker.orders = {order.number: order for order in queue.orders}
                answered = [answer.number for answer in self._place.results(number)]
                worker.next_order = 1 + max([0, *worker.orders, *answered])
                worker.since_s = time.time()

    def _worker_with(self, trial_id: int) -> _Worker | None:
        self._look()
        return self._worker_of(trial_id)

    def _worker_of(self, trial_id: int) -> _Worker | None:
        for worker in self._workers.values():
            if any(order.trial_id == trial_id for order in worker.orders.values()):
                return worker
        return None

    def _free_worker(self) -> _Worker:
        for worker in list(self._workers.values()):
            # The last task of a worker that was found again may have a recorded result already.
            answered = {answer.number for answer in self._place.results(worker.number)}
            if worker.orders.keys() <= answered:
                if self._place.exit_of(worker.number) is None:
                    return worker
                del self._workers[worker.number]
        number = next(number for number in range(1, len(self._workers) + 2) if number not in self._workers)
        worker = self._workers[number] = _Worker(number, self._place.start(number))
        return worker


def _failure_of(gone: WorkerExit) -> Failure:
    if gone.is_canceled:
        return Failure(FailureKind.CANCELED, "its worker was ended from outside")
    failure = failure_from_log(gone.lines, exit_code=gone.exit_code)
    if failure.kind is FailureKind.USER_ERROR:
        # Ranks report failures of the training code; this failure is of the worker itself.
        message = f"its worker has ended twice ({gone.reason}): {failure.message}"
        return Failure(FailureKind.COMMUNICATION, message)
    return failure
