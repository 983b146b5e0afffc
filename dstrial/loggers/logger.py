"""The interface of a logger, and the values that a logger receives."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

from determined import util

# How a run ended: at its configured length, early after a stop request, or with an error.
FinalState = Literal["completed", "stopped", "failed"]

Group: TypeAlias = Literal["training", "validation", "telemetry"]

_EXACT_INTEGERS = 2**53  # larger integers lose digits as floats, and loggers store numbers as floats


@dataclasses.dataclass(frozen=True, slots=True)
class LoggedRun:
    """Description of a run for loggers; secrets are masked."""

    run_id: str  # 16 hexadecimal digits; a resumed run keeps its id
    name: str
    group: str  # name of the run's experiment
    project: str
    hyperparameters: Mapping[str, Any]
    config: Mapping[str, Any]  # without hyperparameters
    directory: Path  # directory for the logger's files of this run; may not exist
    store: Path  # directory for the logger's files that several runs share; may not exist


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """One report of a run to its loggers: metrics that are numbers, NaN included."""

    group: Group
    batches_trained: int
    epochs: float | None  # None if the epoch length is unknown
    numbers: Mapping[str, int | float]
    time_s: float = dataclasses.field(default_factory=time.time)

    def row(self) -> dict[str, int | float]:
        """Return ``<group>/<metric>`` -> number, and ``epochs`` if known."""
        row = {f"{self.group}/{name}": number for name, number in self.numbers.items()}
        return row if self.epochs is None else {**row, "epochs": self.epochs}


class Logger(Protocol):
    """Stores the reports of one run in another system.

    All methods are called on one background thread and may block. If ``log`` raises an error, one warning is logged, and
    ``log`` is still called with later reports.
    """

    def begin(self, run: LoggedRun) -> str:
        """Begin or resume the run; return the run's URL or path.

        If ``begin`` raises an error, ``end`` is not called.
        """

    def log(self, reports: Sequence[Report]) -> None:
        """Store reports, oldest first. A resumed run may report batches a second time."""

    def end(self, state: FinalState) -> None:
        """Record how the run has ended; return when all reports are stored."""


def numbers_of(metrics: Mapping[str, Any]) -> tuple[dict[str, int | float], list[str]]:
    """Return the numeric metrics by name, and the names of all other metrics."""
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
    """Return nested mappings as one dict with dotted keys that begin with ``prefix``."""
    result: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            result.update(flat(value, f"{prefix}{name}."))
        else:
            result[f"{prefix}{name}"] = value
    return result
