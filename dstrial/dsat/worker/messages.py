"""What the driver tells a worker and what the worker answers, as values. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from dstrial.dsat.core.outcome import Outcome, outcome_from_json, outcome_to_json


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """A configuration to measure."""

    number: int
    trial_id: int  # the search's number of the trial
    hparams: dict[str, Any]  # all, as the trial reads them
    deadline_s: float  # the measurement is ended after so many seconds
    metric: str  # the searched one
    best: dict[str, Any] | None = None  # ``hparams`` and ``metrics`` of the search's best


@dataclasses.dataclass(frozen=True, slots=True)
class TaskQueue:
    """The message of a driver to a worker; each one replaces the last."""

    orders: tuple[Task, ...] = ()  # without a known result
    results: Mapping[str, str] | None = None  # files to keep once the search is over; ends a measurement
    report: Mapping[str, Any] | None = None  # of the search so far, for people; workers do not read it

    def to_json(self) -> dict[str, Any]:
        return {
            "orders": [dataclasses.asdict(order) for order in self.orders],
            "results": None if self.results is None else dict(self.results),
            **({} if self.report is None else {"report": dict(self.report)}),
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> TaskQueue:
        return cls(
            tuple(Task(**order) for order in fields["orders"]), fields["results"], fields.get("report")
        )


@dataclasses.dataclass(frozen=True, slots=True)
class TaskResult:
    """The result of a task."""

    number: int
    outcome: Outcome
    seconds: float  # ranks that had to be started first are included
    generation: int = 1  # of the ranks that measured it
    respawned: str = ""  # why the ranks were ended afterwards; empty if they live on
    # seconds of each part, resources of rank 0
    details: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
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
        return cls(
            int(fields["number"]),
            outcome_from_json(fields),
            float(fields["seconds"]),
            int(fields["generation"]),
            str(fields["respawned"]),
            dict(fields["details"]),
        )
