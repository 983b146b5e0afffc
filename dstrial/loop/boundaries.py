"""Settings and progress of a run; when to report, validate, checkpoint and end.

Decisions depend only on the batch counter in ``Progress``, so that all ranks decide equally without communication.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import pathlib
from collections.abc import Container, Mapping
from typing import Any, Literal

from determined import pytorch

from dstrial.config.experiment_config.dstrial_section import TrainingChecks
from dstrial.config.schema import Length
from dstrial.loop.sync_point import StopReason


class Boundary(enum.Enum):
    """Actions that can be due after a batch, in their order of execution.

    ``END`` is due after the last batch.
    """

    REPORT = "report"
    VALIDATE = "validate"
    CHECKPOINT = "checkpoint"
    END = "end"


@dataclasses.dataclass(slots=True)
class Progress:
    """The run's counters of batches, validations and checkpoints.

    Attributes:
        epoch_length: batches in one epoch; None if the training loader has no length.
        batches_trained: finished batches since the start of the run, including those before a resume.
        last_validation: value of ``batches_trained`` at the newest validation; None before the first validation.
        last_checkpoint: value of ``batches_trained`` at the newest checkpoint; None before the first checkpoint.
    """

    epoch_length: int | None
    batches_trained: int = 0
    last_validation: int | None = None
    last_checkpoint: int | None = None

    @property
    def epoch_idx(self) -> int:
        """0-based epoch of the next batch; 0 if the epoch length is unknown."""
        return self.batches_trained // self.epoch_length if self.epoch_length else 0

    @property
    def is_epoch_start(self) -> bool:
        return (
            self.batches_trained % self.epoch_length == 0 if self.epoch_length else self.batches_trained == 0
        )

    @property
    def validation_is_current(self) -> bool:
        return self.last_validation == self.batches_trained

    @property
    def checkpoint_is_current(self) -> bool:
        return self.last_checkpoint == self.batches_trained

    def state_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the counters from a checkpoint, except ``epoch_length``."""
        self.batches_trained = int(state["batches_trained"])
        self.last_validation = state["last_validation"]
        self.last_checkpoint = state["last_checkpoint"]


@dataclasses.dataclass(frozen=True, slots=True)
class Period:
    """When an action is due, counted in batches or epochs (``unit``).

    Either ``every`` is the distance between two due times, or ``positions`` has all counts at which the action is due.
    """

    unit: Literal["batches", "epochs"]
    every: int | None = None
    positions: Container[int] | None = None

    @classmethod
    def from_train_unit(cls, unit: pytorch.TrainUnit) -> Period:
        """Convert Determined's ``Batch(...)`` or ``Epoch(...)``; an int below 1 becomes 1."""
        if isinstance(unit, pytorch.Batch):
            name: Literal["batches", "epochs"] = "batches"
        elif isinstance(unit, pytorch.Epoch):
            name = "epochs"
        else:
            raise TypeError(
                f"a period is {unit!r}; expected Batch(...) or Epoch(...). Wrap the number in one of them."
            )
        if isinstance(unit.value, int):
            return cls(name, every=max(unit.value, 1))
        if isinstance(unit.value, Container) and not isinstance(unit.value, str):
            return cls(name, positions=unit.value)
        raise TypeError(
            f"{type(unit).__name__} holds {unit.value!r}; expected an int or a list of ints. Pass one."
        )

    def is_due(self, batches_trained: int, epoch_length: int | None) -> bool:
        """Return whether the action is due after exactly ``batches_trained`` batches."""
        if self.unit == "batches":
            count = batches_trained
        elif epoch_length is None or batches_trained % epoch_length:
            return False
        else:
            count = batches_trained // epoch_length
        if self.every is not None:
            return count % self.every == 0
        return self.positions is not None and count in self.positions


@dataclasses.dataclass(frozen=True, slots=True)
class LoopSettings:
    """Length, periods and options of one ``fit`` call; immutable.

    Attributes:
        trial_id: id of the trial, which its checkpoints record; 0 without a cluster.
        max_validation_rounds: maximum number of ``evaluate_batch`` calls per validation; None for no limit.
        is_rewrite: if true, ``fit`` does not train, and only saves ``latest_checkpoint`` again in the current rank layout.
        saves_in_background: whether checkpoints are written while training continues.
        reports_epochs: whether metrics are also reported at the end of every epoch.
    """

    max_length: pytorch.TrainUnit
    reporting_period: pytorch.TrainUnit
    validation_period: pytorch.TrainUnit | None
    checkpoint_period: pytorch.TrainUnit | None
    checkpoint_policy: Literal["best", "all", "none"]
    searcher_metric: str | None
    smaller_is_better: bool
    latest_checkpoint: str | None
    step_zero_validation: bool
    data_seed: int
    trial_id: int
    max_validation_rounds: int | None = None
    is_rewrite: bool = False
    saves_in_background: bool = True
    checks: TrainingChecks = dataclasses.field(default_factory=TrainingChecks)
    reports_epochs: bool = False
    has_telemetry: bool = True

    def periods(self) -> dict[Boundary, Period]:
        """Return the configured periods by action, without actions that have no period."""
        given = {
            Boundary.REPORT: self.reporting_period,
            Boundary.VALIDATE: self.validation_period,
            Boundary.CHECKPOINT: self.checkpoint_period,
        }
        return {
            boundary: Period.from_train_unit(unit) for boundary, unit in given.items() if unit is not None
        }


@dataclasses.dataclass(frozen=True, slots=True)
class FitResult:
    """Result of ``Trainer.fit``.

    Attributes:
        batches_trained: finished batches of the run.
        batches_total: length of the run in batches.
        stopped: why training ended early; None if training is complete.
        checkpoint_uuid: the newest checkpoint that this call wrote; None without one.
        checkpoint_path: the directory of ``checkpoint_uuid``; None on a cluster and in object storage.
        skipped_steps: number of optimizer steps, of all engines, that were skipped because gradients were not finite.
        run_path: the run directory, for ``dstrial.runs``; None on a cluster and, without a launcher, on ranks above 0.
        metrics: newest metrics of ``training`` and ``validation`` that this call reported; empty except on rank 0.
    """

    batches_trained: int
    batches_total: int
    stopped: StopReason | None
    checkpoint_uuid: str | None
    skipped_steps: int = 0
    checkpoint_path: pathlib.Path | None = dataclasses.field(default=None, compare=False)
    run_path: pathlib.Path | None = dataclasses.field(default=None, compare=False)
    metrics: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict, compare=False)

    @property
    def is_complete(self) -> bool:
        """Whether training reached ``batches_total``."""
        return self.stopped is None


def due(
    periods: Mapping[Boundary, Period | None],
    batches_trained: int,
    batches_total: int,
    epoch_length: int | None,
) -> set[Boundary]:
    """Return the actions that are due after ``batches_trained`` batches.

    ``END`` is due from ``batches_total`` on. ``epoch_length`` is None if the training loader has no length.
    """
    found = {
        boundary
        for boundary, period in periods.items()
        if period is not None and period.is_due(batches_trained, epoch_length)
    }
    if batches_trained >= batches_total:
        found.add(Boundary.END)
    return found


def next_due(
    periods: Mapping[Boundary, Period | None],
    batches_trained: int,
    batches_total: int,
    epoch_length: int | None,
) -> int:
    """Return the next batch count after ``batches_trained`` at which to call ``due``.

    At the counts in between, ``due`` returns no action. The result is at most ``batches_total`` and at most the
    end of the current epoch.
    """
    found = batches_total
    if epoch_length is not None:
        found = min(found, (batches_trained // epoch_length + 1) * epoch_length)
    for period in periods.values():
        if period is not None and period.unit == "batches":
            every = period.every or 1  # `positions` is unordered, so it is checked after each batch
            found = min(found, (batches_trained // every + 1) * every)
    return found


def total_batches(length: pytorch.TrainUnit, epoch_length: int | None) -> int:
    if not isinstance(length, (pytorch.Batch, pytorch.Epoch)) or not isinstance(length.value, int):
        raise TypeError(f"max_length is {length!r}; expected Batch(int) or Epoch(int). Pass one of them.")
    if length.value < 1:
        raise ValueError(f"max_length is {length.value}; expected at least 1. Set it to how long to train.")
    if isinstance(length, pytorch.Batch):
        return length.value
    if epoch_length is None:
        raise ValueError(
            "max_length is counted in epochs, but the training loader has no length; expected batches. "
            "Use Batch(n), or give the loader a __len__."
        )
    return length.value * epoch_length


def train_unit(length: Length, global_batch_size: int) -> pytorch.TrainUnit:
    """Convert a length to ``Batch`` or ``Epoch``.

    A number of records becomes a number of batches: rounded down, but at least 1.
    """
    if length.unit == "epochs":
        return pytorch.Epoch(length.value)
    if length.unit == "records":
        return pytorch.Batch(max(length.value // global_batch_size, 1))
    return pytorch.Batch(length.value)


def searcher_length(searcher: Mapping[str, Any], global_batch_size: int) -> pytorch.TrainUnit | None:
    """Return the searcher's ``max_length`` or ``max_time`` as a train unit, or None.

    None if the searcher section has neither, or if ``max_time`` is not in batches or epochs.
    """
    if searcher.get("max_length") is not None:
        return train_unit(Length.from_config(searcher["max_length"]), global_batch_size)
    if searcher.get("max_time") is not None and searcher.get("time_metric") in ("batches", "epochs"):
        return train_unit(Length(int(searcher["max_time"]), searcher["time_metric"]), global_batch_size)
    return None


def asks_for_checkpoint(policy: str, now: Any, best_before: float | None, *, smaller_is_better: bool) -> bool:
    """Return whether the checkpoint policy requires a checkpoint after a validation.

    Policy ``all`` always does, policy ``none`` never. Policy ``best`` does if the searcher metric ``now`` is better than
    ``best_before``, the best earlier value. NaN is never better; any number is better than None or NaN.
    """
    if policy != "best":
        return policy == "all"
    value = float(now)
    if math.isnan(value):
        return False
    if best_before is None or math.isnan(best_before):
        return True
    return bool(value < best_before if smaller_is_better else value > best_before)
