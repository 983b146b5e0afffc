"""What a logger is told, and the contract of one. Pure."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

from determined import util

FinalState = Literal["completed", "stopped", "failed"]
"""How a run ends: at its length, before it because somebody asked, or with an error."""

Group: TypeAlias = Literal["training", "validation", "telemetry"]
"""What a report is of: batches, a validation, or what the run tells of itself."""

_EXACT_INTEGERS = 2**53


@dataclasses.dataclass(frozen=True, slots=True)
class LoggedRun:
    """What a logger is told before the first report.

    Attributes:
        run_id: 16 hexadecimal digits, the same for every attempt at the same run and for no other run.
        name: of the run among those of its project.
        group: what the run belongs to: its experiment.
        project: the experiment's name.
        hyperparameters: as the trial sees them, secrets masked.
        config: the experiment config without hyperparameters, secrets masked.
        directory: where files of this run may lie, not made yet.
        store: where a file of many runs may lie.
    """

    run_id: str
    name: str
    group: str
    project: str
    hyperparameters: Mapping[str, Any]
    config: Mapping[str, Any]
    directory: Path
    store: Path


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """The numbers of one report.

    Attributes:
        group: what was measured.
        batches_trained: finished batches of the run.
        epochs: the same in epochs; None where an epoch has no length.
        numbers: metric name -> number, NaN and infinities included.
        time_s: when it was reported, seconds since 1970.
    """

    group: Group
    batches_trained: int
    epochs: float | None
    numbers: Mapping[str, int | float]
    time_s: float = dataclasses.field(default_factory=time.time)

    def named(self) -> dict[str, int | float]:
        """Return the numbers as loggers call them, ``training/loss`` for example."""
        return {f"{self.group}/{name}": number for name, number in self.numbers.items()}


class Logger(Protocol):
    """Keeps the reports of one run somewhere else.

    All methods are called on the same thread, which is not the one that trains, and may take their time. What they raise is
    warned of once; ``log`` is called again with later reports.
    """

    def begin(self, run: LoggedRun) -> str:
        """Begin or take up the run, and return where it is to be seen."""

    def log(self, reports: Sequence[Report]) -> None:
        """Keep reports, the oldest first."""

    def end(self, state: FinalState) -> None:
        """Say how the run has ended, and wait until all is kept."""


def numbers_of(metrics: Mapping[str, Any]) -> tuple[dict[str, int | float], list[str]]:
    """Return the numbers among metrics, and the names of the others."""
    numbers: dict[str, int | float] = {}
    others = []
    for name, value in metrics.items():
        number = _number(value)
        if number is None:
            others.append(str(name))
        else:
            numbers[str(name)] = number
    return numbers, others


def _number(value: Any) -> int | float | None:
    if not util.is_numerical_scalar(value):
        return None
    plain = value.item() if hasattr(value, "item") else value
    if isinstance(plain, complex):
        return None
    if isinstance(plain, int) and abs(plain) <= _EXACT_INTEGERS:
        return int(plain)
    try:
        return float(plain)
    except OverflowError:
        return None


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one with dotted names."""
    result: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            result.update(flat(value, f"{prefix}{name}."))
        else:
            result[f"{prefix}{name}"] = value
    return result


def is_finite(number: float) -> bool:
    """Say whether a number is neither NaN nor infinite."""
    return math.isfinite(number)
