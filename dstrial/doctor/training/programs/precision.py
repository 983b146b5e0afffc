"""Train each ZeRO stage in each precision for five batches, in the same ranks.

fp16 in stage 0 is left out: DeepSpeed 0.19 does not scale its losses.
"""

from __future__ import annotations

import itertools
import math
import time
from typing import Any

from deepspeed.accelerator import get_accelerator

from dstrial.doctor.training.programs.program import Program, deepspeed_config
from dstrial.doctor.training.programs.trial import TextTrial, train

_NUM_BATCHES = 5


class Watched(TextTrial):
    """Notes the loss scale after every batch."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.scales: list[float] = []

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        """Train one micro batch."""
        found = super().train_batch(dataloader_iter, epoch_idx, batch_idx)
        self.scales.append(loss_scale(self.engine))
        return found


def loss_scale(engine: Any) -> float:
    """Return the present loss scale of an engine's optimizer; 1 where it has none."""
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    for owner, name in (
        (scaler, "cur_scale"),
        (engine.optimizer, "cur_scale"),
        (engine.optimizer, "loss_scale"),
    ):
        value = getattr(owner, name, None)
        if isinstance(value, (int, float)):
            return float(value)
    return 1.0


def main() -> None:
    """Train all but one, and note a row of each."""
    program = Program()
    program.keep_group()
    rows: list[dict[str, Any]] = []
    supported = {str(dtype) for dtype in get_accelerator().supported_dtypes()}
    names = {"fp32": "torch.float32", "bf16": "torch.bfloat16", "fp16": "torch.float16"}
    for precision, stage in itertools.product(names, range(4)):
        row: dict[str, Any] = {"precision": precision, "stage": stage}
        rows.append(row)
        if names[precision] not in supported:
            row["result"] = "not supported by this device"
            continue
        if (precision, stage) == ("fp16", 0):
            row["result"] = "refused before training"
            continue
        program.note(doing=f"{precision} with ZeRO {stage}", configurations=rows)
        began_s = time.monotonic()
        try:
            trial, _ = train(
                {"deepspeed_config": deepspeed_config(stage, precision)}, _NUM_BATCHES, trial_class=Watched
            )
        except Exception as error:
            row["result"] = f"{type(error).__name__}: {error}"
            program.note(configurations=rows)
            if program.may_go_on_after(error):
                continue
            raise
        losses = [float(loss) for loss in trial.losses]
        row |= {
            "first_loss": losses[0],
            "last_loss": losses[-1],
            "scales": trial.scales if precision == "fp16" else [],
            "skipped": int(trial.engine.skipped_steps),
            "seconds": round(time.monotonic() - began_s, 2),
            "result": "finite" if all(map(math.isfinite, losses)) else "a loss is not finite",
        }
        program.note(configurations=rows)
    program.note(doing="")


if __name__ == "__main__":
    main()
