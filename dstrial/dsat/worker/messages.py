"""What the driver tells a worker and what the worker answers, as values. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from dstrial.dsat.core.outcome import Outcome, outcome_from_json, outcome_to_json


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """A configuration to measure.

    Attributes:
        number: from 1, in the order in which a worker takes them.
        trial_id: the search's number of the trial.
        hparams: all hyperparameters of the trial, as it reads them.
        deadline_s: the measurement is ended after so many seconds.
        metric: the searched one, by which a later re-measurement of the best configuration is judged.
        best: ``hparams`` and ``metrics`` of the search's best configuration, for a worker that has not measured it
            itself, or not in this process; None if there is none.
    """

    number: int
    trial_id: int
    hparams: dict[str, Any]
    deadline_s: float
    metric: str
    best: dict[str, Any] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class TaskQueue:
    """All that a driver tells a worker; each one replaces the last.

    Attributes:
        orders: those without a known answer, by number.
        results: once the search is over, files to keep in a checkpoint, name -> text; None while it goes on. What is
            being measured is then ended.
        report: of the search so far, JSON values for whoever looks on; None if there is none. Workers do not read it.
    """

    orders: tuple[Task, ...] = ()
    results: Mapping[str, str] | None = None
    report: Mapping[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "orders": [dataclasses.asdict(order) for order in self.orders],
            "results": None if self.results is None else dict(self.results),
            **({} if self.report is None else {"report": dict(self.report)}),
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> TaskQueue:
        """Return what :meth:`to_json` was called on."""
        return cls(
            tuple(Task(**order) for order in fields["orders"]), fields["results"], fields.get("report")
        )


@dataclasses.dataclass(frozen=True, slots=True)
class TaskResult:
    """How an order ended.

    Attributes:
        number: of the order.
        outcome: measured values, or a failure.
        seconds: from taking the order to its answer; ranks that had to be started first are included.
        generation: which ranks measured it; 1 are the worker's first.
        respawned: why the ranks were ended afterwards; empty if they live on.
        details: seconds of each part, and what rank 0 held afterwards; empty where it did not answer.
    """

    number: int
    outcome: Outcome
    seconds: float
    generation: int = 1
    respawned: str = ""
    details: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values, for a line of a file or a row of metrics."""
        return {
            "number": self.number,
            "seconds": self.seconds,
            "generation": self.generation,
            "respawned": self.respawned,
            "details": dict(self.details),
            **outcome_to_json(self.outcome),
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> TaskResult:
        """Return what :meth:`to_json` was called on."""
        return cls(
            int(fields["number"]),
            outcome_from_json(fields),
            float(fields["seconds"]),
            int(fields["generation"]),
            str(fields["respawned"]),
            dict(fields["details"]),
        )
