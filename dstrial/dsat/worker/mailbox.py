"""Where a worker reads its orders and leaves its answers: files of this machine, or its own experiment on a master."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from dstrial.dsat.worker.orders import Answer, OrderBook
from dstrial.errors import DstrialError
from dstrial.local.json_files import append_json_line, read_json, repair_json_lines

logger = logging.getLogger("dstrial.dsat")

GROUP = "dsat"
"""Metric group of a worker's answers; a row's number of steps is the order's number."""

ORDERS_NAME = "orders.json"
ANSWERS_NAME = "answers.jsonl"


class Mailbox(Protocol):
    """A worker's side."""

    poll_s: float

    def book(self) -> OrderBook:
        """Return what the driver has last said; an empty book if it has said nothing, or does not answer now."""

    def answer(self, answer: Answer) -> None:
        """Leave an answer; it is kept when this returns."""

    def keep(self, results: Mapping[str, str]) -> None:
        """Keep the search's files with the worker."""

    def should_stop(self) -> bool:
        """Say whether the worker's slots are wanted back."""


class FileMailbox:
    """Files in a directory of this machine.

    Args:
        directory: of the worker.
    """

    poll_s = 0.02

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        repair_json_lines(directory / ANSWERS_NAME)

    def book(self) -> OrderBook:
        """Return what the driver has written."""
        fields = read_json(self._directory / ORDERS_NAME)
        return OrderBook() if fields is None else OrderBook.from_json(fields)

    def answer(self, answer: Answer) -> None:
        """Append a line."""
        append_json_line(self._directory / ANSWERS_NAME, answer.to_json())

    def keep(self, results: Mapping[str, str]) -> None:
        """Do nothing: the driver writes them into the search's directory itself."""

    def should_stop(self) -> bool:
        """Nobody wants the slots of this machine back."""
        return False


class ExperimentMailbox:
    """The notes of the worker's own experiment, which the driver writes, and its trial's metrics.

    Both are open to any client of any Determined: nothing of the protocol is new.

    Args:
        core_context: entered, of rank 0.
        experiment_id: the worker's own.
    """

    poll_s = 0.3

    def __init__(self, core_context: Any, experiment_id: int) -> None:
        from determined.experimental import Determined

        self._core = core_context
        self._experiment = Determined().get_experiment(experiment_id)

    def book(self) -> OrderBook:
        """Return what the notes say; an empty book while the master is away."""
        from determined.common.api import errors

        try:
            self._experiment.reload()
        except (errors.MasterNotFoundException, errors.APIException, OSError) as error:
            logger.warning("the master does not say what to measure (%s); trying again", error)
            return OrderBook()
        return book_from_notes(self._experiment.notes or "")

    def answer(self, answer: Answer) -> None:
        """Report a row of metrics; one without values carries the failure as text."""
        fields = answer.to_json()
        row = {**fields.pop("metrics", {}), "answer": json.dumps(fields)}
        self._core.train.report_metrics(group=GROUP, steps_completed=answer.number, metrics=row)

    def keep(self, results: Mapping[str, str]) -> None:
        """Put the files into a checkpoint."""
        metadata = {"steps_completed": 0, "dsat": True}
        with self._core.checkpoint.store_path(metadata) as (path, _uuid):
            for name, text in results.items():
                (Path(path) / name).write_text(text, encoding="utf-8")

    def should_stop(self) -> bool:
        """Say whether the master wants the slots for another experiment."""
        return bool(self._core.preempt.should_preempt())


def answer_from_row(row: Mapping[str, Any]) -> Answer:
    """Return what :meth:`ExperimentMailbox.answer` has reported."""
    fields = json.loads(row["answer"])
    if "failure" not in fields:
        fields["metrics"] = {
            name: value for name, value in row.items() if isinstance(value, (int, float)) and name != "answer"
        }
    return Answer.from_json(fields)


_NOTES_BEGIN = "Orders of dsat to its worker (JSON; do not edit):\n"


def notes_of(book: OrderBook) -> str:
    """Return a book as notes of an experiment."""
    return _NOTES_BEGIN + json.dumps(book.to_json())


def book_from_notes(notes: str) -> OrderBook:
    """Return what :func:`notes_of` was called on; an empty book for other notes.

    Raises:
        DstrialError: somebody has edited it.
    """
    if not notes.startswith(_NOTES_BEGIN):
        return OrderBook()
    try:
        return OrderBook.from_json(json.loads(notes.removeprefix(_NOTES_BEGIN)))
    except (ValueError, KeyError, TypeError) as error:
        raise DstrialError(
            f"the notes of the worker's experiment are no orders ({error}); expected those that dsat wrote. "
            "Kill the experiment; the same command starts another worker."
        ) from error
