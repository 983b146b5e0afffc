"""Time what is between two steps: in ``Trainer.fit``, and in a bare loop."""

from __future__ import annotations

import statistics
import time
from typing import Any

import dstrial
from dstrial.doctor.training.programs.program import Program, deepspeed_config
from dstrial.doctor.training.programs.trial import TextTrial, train

_NUM_BATCHES, _SETTLING = 400, 40


class Stamped(TextTrial):
    """Notes when a step is entered and left, and trains as many bare ones in turns."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.entered: list[float] = []
        self.left: list[float] = []

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        """Train one batch."""
        self.entered.append(time.perf_counter())
        found = super().train_batch(dataloader_iter, epoch_idx, batch_idx)
        self.left.append(time.perf_counter())
        return found

    def between_us(self) -> float:
        """Return the median time from the end of a step to the start of the next."""
        pairs = list(zip(self.left, self.entered[1:], strict=False))[_SETTLING:]
        return 1e6 * statistics.median(entered - left for left, entered in pairs)

    def step_us(self) -> float:
        """Return the median time of a step."""
        pairs = list(zip(self.entered, self.left, strict=True))[_SETTLING:]
        return 1e6 * statistics.median(left - entered for entered, left in pairs)


def main() -> None:
    """Measure both."""
    program = Program()
    program.keep_group()
    hparams = {
        "deepspeed_config": deepspeed_config(0),
        "shape": {"width": 32, "num_layers": 1, "block_size": 16},
        "num_blocks": 4 * (_NUM_BATCHES + 1),
    }
    trial, _ = train(hparams, _NUM_BATCHES, trial_class=Stamped, reporting_period=dstrial.Batch(1_000_000))
    found, step_us = trial.between_us(), trial.step_us()
    trial.entered.clear()
    trial.left.clear()
    # The same loader in a loop that does nothing else.
    loader = trial.build_training_data_loader().get_data_loader()
    iterator = iter(loader)
    for batch_idx in range(_NUM_BATCHES):
        trial.train_batch(iterator, 0, batch_idx)
    bare_us = trial.between_us()
    program.note(
        step_us=step_us,
        dstrial_us=found,
        bare_us=bare_us,
        added_percent=100 * max(found - bare_us, 0.0) / step_us,
    )


if __name__ == "__main__":
    main()
