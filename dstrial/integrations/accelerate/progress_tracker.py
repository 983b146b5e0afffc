"""How far an Accelerate loop is, how long it trains, and what is due now."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal, cast

from determined import pytorch

from dstrial.config import Length
from dstrial.config.dotted_keys import dstrial_section
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

_TEST_BATCHES = 2


@dataclasses.dataclass(frozen=True, slots=True)
class RunSchedule:
    """What an experiment config says about a run.

    Attributes:
        length: how long to train; None if the config does not say.
        periods: how often to report, validate and checkpoint, besides at the end; None for only then.
        checkpoint_policy: whether a validation is followed by a checkpoint: always, if it is the best so far, or never.
        metric: the searcher's validation metric; None if there is no searcher.
        smaller_is_better: which way it is compared.
        saves_in_background: whether checksums, upload and registration of a checkpoint happen behind the loop.
    """

    length: pytorch.TrainUnit | None
    periods: Mapping[Boundary, Period | None]
    checkpoint_policy: Literal["best", "all", "none"]
    metric: str | None
    smaller_is_better: bool
    saves_in_background: bool

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, Any],
        *,
        global_batch_size: int,
        length: pytorch.TrainUnit | None,
        is_test: bool,
    ) -> RunSchedule:
        """Read a plan from an experiment config.

        Args:
            config: the whole config, or nothing: then training metrics are reported every 100 batches.
            global_batch_size: records of one optimizer step, for lengths counted in records.
            length: what the caller said itself, which wins.
            is_test: two batches and nothing in between.

        Raises:
            ConfigError: a length in the config is none.
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
        """Return how long to train.

        Raises:
            ConfigError: neither the config nor the script says so.
        """
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
    """Counts a run's batches against its plan; alike on all ranks, without exchange.

    Attributes:
        progress: the counters, which checkpoints keep. How long an epoch is stays out of them: the loop learns that only when
            it sees the loader.
        batches_total: length of the run in batches; None as long as it is not known.
        stopped: why training stopped before its length; None if it did not.
    """

    def __init__(self) -> None:
        self.progress = Progress(epoch_length=None)
        self.batches_total: int | None = None
        self.stopped: StopReason | None = None
        self._plan: RunSchedule | None = None
        self._epoch_length: int | None = None
        self._due: set[Boundary] = set()

    def begin(self, plan: RunSchedule, epoch_length: int | None) -> None:
        """Take over what was planned, once the counters are those of the run.

        Args:
            plan: what the experiment config says.
            epoch_length: batches of an epoch when the checkpoint was written; None for a new run, or if it was not known.

        Raises:
            ConfigError: neither the config nor the script says how long to train.
        """
        self._plan = plan
        self._epoch_length = epoch_length
        self._count_total()

    @property
    def epoch_length(self) -> int | None:
        """Batches of an epoch; None before the loader is known."""
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
        """Optimizer steps since the start of the run, over all resumes."""
        return self.progress.batches_trained

    @property
    def epoch_idx(self) -> int:
        """Epoch of the next batch, from 0; 0 while an epoch's length is not known."""
        return self.batches_trained // self._epoch_length if self._epoch_length else 0

    @property
    def is_at_end(self) -> bool:
        """Whether all batches are trained."""
        return Boundary.END in self._due

    @property
    def is_over(self) -> bool:
        """Whether training is over, at its length or because it was asked to stop."""
        return self.stopped is not None or self.is_at_end

    @property
    def needs_validation(self) -> bool:
        """Whether it is time to validate the weights of now."""
        wanted = {Boundary.VALIDATE} if self.stopped is not None else {Boundary.VALIDATE, Boundary.END}
        return bool(self._due & wanted) and not self.progress.validation_is_current

    @property
    def needs_checkpoint(self) -> bool:
        """Whether the weights of now are to be saved."""
        is_due = Boundary.CHECKPOINT in self._due or self.is_over
        return is_due and not self.progress.checkpoint_is_current

    @property
    def is_report_due(self) -> bool:
        """Whether training metrics are to be reported now."""
        return Boundary.REPORT in self._due

    @property
    def is_anything_due(self) -> bool:
        """Whether all ranks come together after this batch."""
        return bool(self._due)

    @property
    def pauses_training(self) -> bool:
        """Whether something is done after this batch that is no training."""
        return bool(self._due - {Boundary.REPORT})

    def advance(self) -> int:
        """Count a batch; return how many there are."""
        assert self._plan is not None, "begin() comes first"
        self.progress.batches_trained += 1
        total = math.inf if self.batches_total is None else self.batches_total
        self._due = due(self._plan.periods, self.batches_trained, total, self._epoch_length)  # type: ignore[arg-type] # inf: no end
        return self.batches_trained

    def _count_total(self) -> None:
        assert self._plan is not None, "begin() comes first"
        length = self._plan.require_length()
        is_known = isinstance(length, pytorch.Batch) or self._epoch_length is not None
        self.batches_total = total_batches(length, self._epoch_length) if is_known else None
        if self.batches_total is not None and self.batches_trained >= self.batches_total:
            self._due.add(Boundary.END)
