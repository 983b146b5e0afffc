"""Count a loop's batches; decide when to report, validate, save and end."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal, cast

from determined import pytorch

from dstrial.config.dotted_keys import dstrial_section
from dstrial.config.schema import Length
from dstrial.errors import CheckpointError, ConfigError, ConfigProblem
from dstrial.loop.boundaries import (
    Boundary,
    Period,
    Progress,
    due,
    searcher_length,
    total_batches,
    train_unit,
)
from dstrial.loop.sync_point import StopReason

_TEST_BATCHES = 2  # length of a test run (`dstrial run --test`)


@dataclasses.dataclass(frozen=True, slots=True)
class RunSchedule:
    """When a run reports, validates, saves and ends."""

    length: pytorch.TrainUnit | None  # length of training; None if neither script nor config has a length
    periods: Mapping[Boundary, Period | None]  # action -> period; None: only at the end of training
    checkpoint_policy: Literal["best", "all", "none"]
    metric: str | None  # the searcher's metric; None without a searcher
    smaller_is_better: bool
    saves_in_background: bool  # whether checksums, upload and registration run in the background

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, Any],
        *,
        global_batch_size: int,
        length: pytorch.TrainUnit | None,
        is_test: bool,
    ) -> RunSchedule:
        """Read the schedule from an experiment config.

        Args:
            config: the experiment config.
            global_batch_size: records per batch over all ranks, for periods and lengths in records.
            length: length of training, which overrides the config's length; None for the config's length.
            is_test: whether to train only two batches, report after each, and validate and save only at the end.
        """
        searcher = config.get("searcher") or {}

        def period(key: str) -> Period | None:
            value = config.get(key)
            if not value or is_test:
                return None
            found = Length.from_config(value)
            return None if found.value == 0 else Period.from_train_unit(train_unit(found, global_batch_size))

        if is_test:
            length = pytorch.Batch(_TEST_BATCHES)
        elif length is None:
            length = searcher_length(searcher, global_batch_size)
        every = 1 if is_test else int(config.get("scheduling_unit") or 100)
        policy = "none" if is_test else str(config.get("checkpoint_policy") or "best")
        metric = searcher.get("metric")
        background = dstrial_section(config).get("background_saving", True)
        return cls(
            length=length,
            periods={
                Boundary.REPORT: Period("batches", every=every),
                Boundary.VALIDATE: period("min_validation_period"),
                Boundary.CHECKPOINT: period("min_checkpoint_period"),
            },
            checkpoint_policy=cast(
                Literal["best", "all", "none"], "all" if policy == "best" and metric is None else policy
            ),
            metric=None if metric is None else str(metric),
            smaller_is_better=bool(searcher.get("smaller_is_better", True)),
            saves_in_background=background is not False,
        )

    def require_length(self) -> pytorch.TrainUnit:
        if self.length is None:
            problem = ConfigProblem(
                "searcher.max_length",
                "not given, and Reporter(length=...) is not either",
                "how long to train",
                "Set searcher.max_length: {batches: 1000}, or pass Reporter(accelerator, length=dstrial.Batch(1000)).",
            )
            raise ConfigError([problem])
        return self.length


class ProgressTracker:
    """Counts batches; says which actions are due after a batch.

    All ranks have the same state.
    """

    def __init__(self) -> None:
        self.progress = Progress(epoch_length=None)
        self.batches_total: int | None = None
        self.stopped: StopReason | None = None
        self._schedule: RunSchedule | None = None
        self._epoch_length: int | None = None
        self._due: set[Boundary] = set()

    def begin(self, schedule: RunSchedule, epoch_length: int | None) -> None:
        """Set the schedule and the number of batches per epoch (None if unknown)."""
        self._schedule = schedule
        self._epoch_length = epoch_length
        self._count_total()

    @property
    def epoch_length(self) -> int | None:
        """Batches per epoch; None until known from the training loader or a checkpoint."""
        return self._epoch_length

    @epoch_length.setter
    def epoch_length(self, epoch_length: int) -> None:
        if self._epoch_length not in (None, epoch_length):
            raise CheckpointError(
                f"the checkpoint was written with epochs of {self._epoch_length} batches, and the training loader now has "
                f"{epoch_length}; expected as many, since a resume finds its place by them. Restore the records and the "
                "loader's drop_last, or start a new run."
            )
        self._epoch_length = epoch_length
        self._count_total()

    @property
    def batches_trained(self) -> int:
        return self.progress.batches_trained

    @property
    def epoch_idx(self) -> int:
        """Index of the next batch's epoch, from 0; 0 while the epoch length is unknown."""
        return self.batches_trained // self._epoch_length if self._epoch_length else 0

    @property
    def is_at_end(self) -> bool:
        """Whether training has reached its length."""
        return Boundary.END in self._due

    @property
    def is_over(self) -> bool:
        """Whether training has reached its length or was stopped."""
        return self.stopped is not None or self.is_at_end

    @property
    def needs_validation(self) -> bool:
        """Whether a validation is due, and none has been reported since the last batch."""
        wanted = {Boundary.VALIDATE} if self.stopped is not None else {Boundary.VALIDATE, Boundary.END}
        return bool(self._due & wanted) and not self.progress.validation_is_current

    @property
    def needs_checkpoint(self) -> bool:
        """Whether a checkpoint is due, and none has been saved since the last batch."""
        is_due = Boundary.CHECKPOINT in self._due or self.is_over
        return is_due and not self.progress.checkpoint_is_current

    @property
    def is_report_due(self) -> bool:
        return Boundary.REPORT in self._due

    @property
    def is_anything_due(self) -> bool:
        """Whether a report, a validation, a checkpoint or the end of training is due."""
        return bool(self._due)

    @property
    def pauses_training(self) -> bool:
        """Whether a validation, a checkpoint or the end of training is due."""
        return bool(self._due - {Boundary.REPORT})

    def advance(self) -> int:
        """Count a trained batch; return the number of batches trained so far."""
        assert self._schedule is not None, "begin() comes first"
        self.progress.batches_trained += 1
        total = math.inf if self.batches_total is None else self.batches_total
        self._due = due(self._schedule.periods, self.batches_trained, total, self._epoch_length)  # type: ignore[arg-type] # inf: no end
        return self.batches_trained

    def _count_total(self) -> None:
        assert self._schedule is not None, "begin() comes first"
        length = self._schedule.require_length()
        is_known = isinstance(length, pytorch.Batch) or self._epoch_length is not None
        self.batches_total = total_batches(length, self._epoch_length) if is_known else None
        if self.batches_total is not None and self.batches_trained >= self.batches_total:
            self._due.add(Boundary.END)
