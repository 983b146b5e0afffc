"""What a training loop is told to do, and what it answers: plain values."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Literal

from determined import pytorch

from dstrial.config.experiment_config.dstrial_section import TrainingChecks
from dstrial.loop.sync_point import StopReason


@dataclasses.dataclass(frozen=True, slots=True)
class LoopSettings:
    """What to do when; constant over a run.

    Attributes:
        trial_id: 0 off a cluster.
        max_validation_rounds: evaluate at most this many rounds per validation; None for all.
        is_rewrite: save ``latest_checkpoint`` again in the current layout, and end before the first batch.
        saves_in_background: whether checkpoints are written while training goes on.
        reports_epochs: whether the end of every epoch is a report, too.
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


@dataclasses.dataclass(frozen=True, slots=True)
class FitResult:
    """How training ended.

    Attributes:
        batches_trained: finished batches of the run.
        batches_total: its length in batches.
        stopped: why it ended early; None if it is complete.
        checkpoint_uuid: the newest checkpoint this call wrote; None if it wrote none.
        checkpoint_path: its directory, where the checkpoints of a run lie on this machine; None on a cluster.
        skipped_steps: optimizer steps of the run that were skipped because gradients were not finite, of all engines.
    """

    batches_trained: int
    batches_total: int
    stopped: StopReason | None
    checkpoint_uuid: str | None
    skipped_steps: int = 0
    checkpoint_path: pathlib.Path | None = dataclasses.field(default=None, compare=False)

    @property
    def is_complete(self) -> bool:
        """Whether the whole length was trained."""
        return self.stopped is None
