"""Compare how long a Trainer is going to train with what the searcher says; pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from dstrial.errors import ConfigProblem

_UNITS = ("batches", "epochs")


@dataclasses.dataclass(frozen=True, slots=True)
class TrainerLength:
    """How long the Trainer's arguments say to train.

    Attributes:
        value: batches or epochs.
        unit: which of them.
        argument: the command-line argument that says so.
    """

    value: float
    unit: str
    argument: str

    @classmethod
    def of(cls, max_steps: int, num_train_epochs: float) -> TrainerLength:
        """Return what ``TrainingArguments`` mean: ``max_steps`` where it is above 0, else ``num_train_epochs``."""
        if max_steps > 0:
            return cls(max_steps, "batches", "--max_steps")
        return cls(num_train_epochs, "epochs", "--num_train_epochs")

    def __str__(self) -> str:
        return f"{self.value:g} {self.unit}"


def length_problems(
    searcher: Mapping[str, Any], length: TrainerLength, train_batch_size: int
) -> list[ConfigProblem]:
    """Return every contradiction between the searcher's lengths and the Trainer's.

    A ``max_time`` counted in anything but batches and epochs is the searcher's own affair and agrees with any length.

    Args:
        searcher: the ``searcher`` section of the experiment config.
        length: the Trainer's.
        train_batch_size: records of one batch over all ranks, by which a length in records is counted.
    """
    problems = []
    max_length = searcher.get("max_length")
    if isinstance(max_length, Mapping) and len(max_length) == 1:
        unit, value = next(iter(max_length.items()))
        if unit == "records":
            unit, value = "batches", max(int(value) // train_batch_size, 1)
        problems += _problem("searcher.max_length", f"{dict(max_length)}", str(unit), value, length)
    elif max_length is not None:
        unit = str(searcher.get("unit") or "batches")
        problems += _problem("searcher.max_length", f"{max_length}", unit, max_length, length)
    max_time, time_metric = searcher.get("max_time"), searcher.get("time_metric")
    if max_time is not None and time_metric in _UNITS:
        got = f"{max_time} with searcher.time_metric {time_metric}"
        problems += _problem("searcher.max_time", got, str(time_metric), max_time, length)
    return problems


def _problem(where: str, got: str, unit: str, value: Any, length: TrainerLength) -> list[ConfigProblem]:
    if unit == length.unit and float(value) == float(length.value):
        return []
    flag = {"batches": "--max_steps", "epochs": "--num_train_epochs"}.get(unit, length.argument)
    clear = " and leave --max_steps out" if unit == "epochs" and length.unit == "batches" else ""
    return [
        ConfigProblem(
            where,
            got,
            f"the length of the Trainer, {length} ({length.argument})",
            f"Pass {flag} {value}{clear}, or change {where}.",
        )
    ]
