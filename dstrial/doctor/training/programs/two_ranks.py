"""All-reduce, a few batches of ZeRO 1 and the control channel on two ranks."""

from __future__ import annotations

import math
from typing import Any

import torch

from dstrial.doctor.training.programs.program import Program, deepspeed_config
from dstrial.doctor.training.programs.trial import TextTrial, train


class Talking(TextTrial):
    """All-reduces on the ranks' device, and gathers words over the control channel."""

    program: Program

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        rank = context.distributed.get_rank()
        mine = torch.full((1024,), float(rank + 1), device=context.device)
        torch.distributed.all_reduce(mine)
        found = float(mine.mean())
        told = context.distributed.allgather(f"rank {rank}")
        self.program.note(
            all_reduce=found,
            control_channel=told,
            backend=str(torch.distributed.get_backend()),
            device=str(context.device),
        )


def main() -> None:
    """Train six batches."""
    program = Program()
    Talking.program = program
    trial, _ = train({"deepspeed_config": deepspeed_config(1)}, 6, trial_class=Talking)
    losses = [float(loss) for loss in trial.losses]
    program.note(finite=all(map(math.isfinite, losses)), losses=losses)


if __name__ == "__main__":
    main()
