"""Train five batches with and without ``torch.compile``."""

from __future__ import annotations

import time

import torch
from torch._dynamo.utils import counters

from dstrial.doctor.training.programs.program import Program, deepspeed_config
from dstrial.doctor.training.programs.trial import train


def main() -> None:
    """Compare the losses."""
    program = Program()
    program.keep_group()
    torch.backends.cuda.matmul.allow_tf32 = False
    hparams = {"deepspeed_config": deepspeed_config(0), "shape": {"width": 32, "num_layers": 1}}
    program.note(doing="training without torch.compile")
    plain, _ = train(hparams, 5)
    program.note(doing="training with torch.compile")
    began_s = time.monotonic()
    compiled, _ = train({**hparams, "compiles": True}, 5)
    left, right = ([float(loss) for loss in trial.losses] for trial in (plain, compiled))
    program.note(
        doing="",
        compile_s=round(time.monotonic() - began_s, 2),
        num_graphs=int(counters["stats"]["unique_graphs"]),
        greatest_difference=max(abs(a - b) / abs(a) for a, b in zip(left, right, strict=True)),
        losses=left,
        compiled_losses=right,
    )


if __name__ == "__main__":
    main()
