"""Run workers as experiments: orders are in notes, answers in metrics."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from determined.experimental.client import Experiment, ExperimentState

from dstrial.dsat.backends.cluster import ClusterBackend
from dstrial.dsat.backends.experiments import RUNS, last_lines, why_waiting
from dstrial.dsat.backends.pool import WorkerExit
from dstrial.dsat.backends.trial_spec import worker_config
from dstrial.dsat.config import SearchConfig
from dstrial.dsat.worker.messages import TaskQueue, TaskResult
from dstrial.dsat.worker.transport import GROUP, notes_of, queue_from_notes, result_from_row

_POLL_PERIOD_S = 0.5
_CANCELED = (ExperimentState.CANCELED, ExperimentState.DELETED)
_ENDED = (*_CANCELED, ExperimentState.COMPLETED, ExperimentState.ERROR)


@dataclasses.dataclass(slots=True)
class _Seen:
    """The last known state of a worker's experiment."""

    experiment: Experiment
    answers: dict[int, TaskResult] = dataclasses.field(default_factory=dict)
    next_poll_s: float = 0.0
    is_ended: bool = False
    is_running: bool = False


class ClusterPlacement:
    """Workers as experiments of a master; see ``pool.WorkerPlacement``."""

    shows_reports = True

    def __init__(self, settings: SearchConfig, master: ClusterBackend, search_id: str) -> None:
        self._settings = settings
        self._master = master
        self._search_id = search_id
        self._seen: dict[int, _Seen] = {}

    @property
    def num_parallel(self) -> int:
        return self._master.num_parallel

    def describe(self) -> str:
        return self._master.describe()

    def find_running(self, worker: int) -> dict[str, Any] | None:
        """Find the worker's experiment by its label, if it has not ended, or has answers."""
        label = worker_config(self._settings, worker, self._search_id).label
        experiment = self._master.retry_until_available(lambda: self._master.find(label))
        if experiment is None:
            return None
        self._master.retry_until_available(experiment.reload)
        self._seen[worker] = _Seen(experiment)
        self._poll(worker)
        open_numbers = {order.number for order in self.task_queue(worker).orders}
        has_news = bool(open_numbers & self._seen[worker].answers.keys())
        is_alive = not self._seen[worker].is_ended
        return {"experiment_id": experiment.id} if has_news or is_alive else None

    def start(self, worker: int) -> dict[str, Any]:
        spec = worker_config(self._settings, worker, self._search_id)
        experiment = self._master.create(spec.config, spec.label)
        self._seen[worker] = _Seen(experiment)
        return {"experiment_id": experiment.id}

    def task_queue(self, worker: int) -> TaskQueue:
        return queue_from_notes(self._seen[worker].experiment.notes or "")

    def send(self, worker: int, queue: TaskQueue) -> None:
        experiment = self._seen[worker].experiment
        notes = notes_of(queue)
        self._master.retry_until_available(lambda: experiment.set_notes(notes))

    def publish(self, worker: int, queue: TaskQueue) -> bool:
        return self._master.publish_notes(self._seen[worker].experiment, notes_of(queue))

    def results(self, worker: int) -> list[TaskResult]:
        self._poll(worker)
        return list(self._seen[worker].answers.values())

    def why_waiting(self, worker: int) -> str:
        self._poll(worker)
        seen = self._seen[worker]
        return "" if seen.is_running else why_waiting(seen.experiment, self._settings.num_slots)

    def exit_of(self, worker: int) -> WorkerExit | None:
        self._poll(worker)
        seen = self._seen[worker]
        if not seen.is_ended:
            return None
        if seen.experiment.state in _CANCELED:
            return WorkerExit(is_canceled=True)
        lines: list[str] = []
        with self._master.tolerate_outage():
            lines = last_lines(seen.experiment.list_trials())
        return WorkerExit(lines=lines)

    def kill(self, worker: int) -> None:
        seen = self._seen.pop(worker, None)
        if seen is not None:
            self._master.kill_experiment(seen.experiment)

    def _poll(self, worker: int) -> None:
        """Ask for the state, then for answers, at most twice a second; none is missed."""
        seen = self._seen[worker]
        if seen.is_ended or time.monotonic() < seen.next_poll_s:
            return
        with self._master.tolerate_outage():
            seen.experiment.reload()
            is_ended = seen.experiment.state in _ENDED
            trials = seen.experiment.list_trials()
            seen.is_running = bool(trials) and trials[0].state.value in RUNS
            for row in trials[0].iter_metrics(GROUP) if trials else ():
                if row.steps_completed not in seen.answers:
                    seen.answers[row.steps_completed] = result_from_row(row.metrics)
            seen.is_ended = is_ended
        seen.next_poll_s = time.monotonic() + _POLL_PERIOD_S
