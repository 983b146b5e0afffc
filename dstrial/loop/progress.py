"""How far a run is: the one counter of batches; all else is computed from it."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(slots=True)
class Progress:
    """The state of a run's counting; the only mutable counter in the loop.

    Attributes:
        epoch_length: batches in one epoch; None if the training loader does not know its length.
        batches_trained: finished batches since the start of the run, over all resumes.
        last_validation: value of ``batches_trained`` at the newest validation; None before the first.
        last_checkpoint: value of ``batches_trained`` at the newest checkpoint; None before the first.
    """

    epoch_length: int | None
    batches_trained: int = 0
    last_validation: int | None = None
    last_checkpoint: int | None = None

    @property
    def batch_idx(self) -> int:
        """Index of the batch to train next, from 0, over the whole run."""
        return self.batches_trained

    @property
    def epoch_idx(self) -> int:
        """Epoch of the batch to train next, from 0; 0 if the epoch length is unknown."""
        return self.batches_trained // self.epoch_length if self.epoch_length else 0

    @property
    def epochs_trained(self) -> int:
        """Number of finished epochs."""
        return self.epoch_idx

    @property
    def is_epoch_start(self) -> bool:
        """Whether the batch to train next is the first of its epoch."""
        return (
            self.batches_trained % self.epoch_length == 0 if self.epoch_length else self.batches_trained == 0
        )

    @property
    def validation_is_current(self) -> bool:
        """Whether the newest validation saw the weights of now."""
        return self.last_validation == self.batches_trained

    @property
    def checkpoint_is_current(self) -> bool:
        """Whether the newest checkpoint holds the weights of now."""
        return self.last_checkpoint == self.batches_trained

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return dataclasses.asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue a checkpoint's counters; the epoch length stays that of the loader."""
        self.batches_trained = int(state["batches_trained"])
        self.last_validation = state["last_validation"]
        self.last_checkpoint = state["last_checkpoint"]
