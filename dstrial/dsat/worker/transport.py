"""Read orders and leave answers: in files, or on a master that may be away."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

from dstrial.dsat.worker.messages import TaskQueue, TaskResult
from dstrial.errors import DstrialError
from dstrial.local.json_files import append_json_line, read_json, read_json_lines, repair_json_lines

_AWAY_STATUS = (502, 503, 504)

logger = logging.getLogger("dstrial.dsat")
_T = TypeVar("_T")
GROUP = "dsat"
"""Metric group of a worker's answers; a row's number of steps is the order's number."""
ORDERS_NAME = "orders.json"
ANSWERS_NAME = "answers.jsonl"
_RETRY_S = 5.0
_NOTES_BEGIN = "Orders of dsat to its worker (JSON; do not edit):\n"


def is_outage(error: Exception) -> bool:
    """Return whether a client's exception means an absent master, not a refusal.

    Source: ``determined.common.api._session`` 0.38.1; exceptions of requests that it lets through are OSErrors.
    """
    from determined.common.api import errors

    if isinstance(error, errors.APIException):
        return error.status_code in _AWAY_STATUS
    is_lost = type(error) in (errors.BadRequestException, errors.MasterNotFoundException)
    return is_lost or isinstance(error, OSError)


def outage_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions of an absent master; :func:`is_outage` decides."""
    from determined.common.api import errors

    return (errors.BadRequestException, OSError)


class Transport(Protocol):
    """The worker's side of the connection to its driver."""

    poll_s: float

    def task_queue(self) -> TaskQueue:
        """Return the queue that the driver sent last; an empty one before the first."""

    def answered_tasks(self) -> set[int]:
        """Return the tasks that an earlier process of this worker has completed."""

    def report(self, answer: TaskResult) -> None:
        """Report a result; it is durable when this returns."""

    def keep(self, results: Mapping[str, str]) -> None:
        """Keep the search's files in a checkpoint of the worker."""

    def should_stop(self) -> bool:
        """Return whether the worker is preempted."""


class FileTransport:
    poll_s = 0.02

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        repair_json_lines(directory / ANSWERS_NAME)

    def task_queue(self) -> TaskQueue:
        fields = read_json(self._directory / ORDERS_NAME)
        return TaskQueue() if fields is None else TaskQueue.from_json(fields)

    def answered_tasks(self) -> set[int]:
        return {int(row["number"]) for row in read_json_lines(self._directory / ANSWERS_NAME)}

    def report(self, answer: TaskResult) -> None:
        """Append a line; while the disk is full, wait."""
        is_written = False
        while not is_written:
            try:
                append_json_line(self._directory / ANSWERS_NAME, answer.to_json())
                is_written = True
            except OSError as error:
                logger.warning("an answer cannot be written (%s); trying again", error)
                time.sleep(_RETRY_S)

    def keep(self, results: Mapping[str, str]) -> None:
        """No-op: the driver writes the files into the search's directory itself."""

    def should_stop(self) -> bool:
        return False


class ExperimentTransport:
    """The experiment's notes and the trial's metrics; waits for an absent master.

    Both are open to any client of any Determined: nothing of the protocol is new.
    """

    poll_s = 0.3

    def __init__(self, core_context: Any, experiment_id: int, trial_id: int, trial_run_id: int) -> None:
        from determined.experimental import Determined

        self._core = core_context
        client = Determined()
        self._session = client._session
        self._experiment = client.get_experiment(experiment_id)
        self._trial_id, self._trial_run_id = trial_id, trial_run_id

    def task_queue(self) -> TaskQueue:
        """Return the queue in the notes, or the last known one while the master is away."""
        try:
            self._experiment.reload()
        except outage_errors() as error:
            logger.warning("the master does not say what to measure (%s); trying again", error)
        return queue_from_notes(self._experiment.notes or "")

    def answered_tasks(self) -> set[int]:
        """Read the trial's metrics, as the master may have replaced its slots meanwhile."""
        return self._retry_until_available(self._rows)

    def _rows(self) -> set[int]:
        trials = self._experiment.list_trials()
        return {int(row.steps_completed) for trial in trials for row in trial.iter_metrics(GROUP)}

    def report(self, answer: TaskResult) -> None:
        """Report a row of metrics.

        Not through the core context, which returns before the master has the row, and loses it where the master is away.
        """
        from determined.common.api import bindings

        metrics = bindings.v1TrialMetrics(
            metrics=bindings.v1Metrics(avgMetrics=row_of(answer)),
            stepsCompleted=answer.number,
            trialId=self._trial_id,
            trialRunId=self._trial_run_id,
        )
        body = bindings.v1ReportTrialMetricsRequest(group=GROUP, metrics=metrics)
        is_repeated = False

        def report() -> None:
            nonlocal is_repeated
            # The master may have stored the row and died before it answered; a row cannot be reported twice.
            if not (is_repeated and answer.number in self._rows()):
                is_repeated = True
                bindings.post_ReportTrialMetrics(self._session, body=body, metrics_trialId=self._trial_id)

        self._retry_until_available(report)

    def keep(self, results: Mapping[str, str]) -> None:
        def store() -> None:
            metadata = {"steps_completed": 0, "dsat": True}
            with self._core.checkpoint.store_path(metadata) as (path, _uuid):
                for name, text in results.items():
                    (Path(path) / name).write_text(text, encoding="utf-8")

        self._retry_until_available(store)

    def should_stop(self) -> bool:
        try:
            return bool(self._core.preempt.should_preempt())
        except outage_errors() as error:
            logger.warning("the master does not say whether it wants the slots (%s); trying again", error)
            return False

    def _retry_until_available(self, call: Callable[[], _T]) -> _T:
        while True:
            try:
                return call()
            except outage_errors() as error:
                if not is_outage(error):
                    raise
                logger.warning("the master is away (%s); trying again", error)
                time.sleep(_RETRY_S)


def row_of(answer: TaskResult) -> dict[str, Any]:
    """Return a result as a row of metrics; all but its values is text in one field."""
    fields = answer.to_json()
    return {**fields.pop("metrics", {}), "answer": json.dumps(fields)}


def result_from_row(row: Mapping[str, Any]) -> TaskResult:
    """Return the result of :func:`row_of`."""
    fields = json.loads(row["answer"])
    if "failure" not in fields:
        fields["metrics"] = {
            name: value for name, value in row.items() if isinstance(value, (int, float)) and name != "answer"
        }
    return TaskResult.from_json(fields)


def notes_of(queue: TaskQueue) -> str:
    """Return a queue as notes of an experiment."""
    return _NOTES_BEGIN + json.dumps(queue.to_json())


def are_orders(notes: str) -> bool:
    """Return whether notes are those of :func:`notes_of`, not of a person."""
    return notes.startswith(_NOTES_BEGIN)


def queue_from_notes(notes: str) -> TaskQueue:
    """Return the queue of :func:`notes_of`; an empty one for other notes."""
    if not are_orders(notes):
        return TaskQueue()
    try:
        return TaskQueue.from_json(json.loads(notes.removeprefix(_NOTES_BEGIN)))
    except (ValueError, KeyError, TypeError) as error:
        raise DstrialError(
            f"the notes of the worker's experiment are no orders ({error}); expected those that dsat wrote. "
            "Kill the experiment; the same command starts another worker."
        ) from error
