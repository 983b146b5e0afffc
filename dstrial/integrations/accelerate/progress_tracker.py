"""How far an Accelerate loop is, how long it trains, and what is due now."""

from __future__ import annotations

import math

from determined import pytorch

from dstrial.errors import CheckpointError
from dstrial.integrations.accelerate.schedule import Plan
from dstrial.loop.boundaries import Boundary, due, total_batches
from dstrial.loop.progress import Progress
from dstrial.loop.sync_point import StopReason


class Course:
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
        self._plan: Plan | None = None
        self._epoch_length: int | None = None
        self._due: set[Boundary] = set()

    def begin(self, plan: Plan, epoch_length: int | None) -> None:
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
