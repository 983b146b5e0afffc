"""Save a model of very many small tensors behind the loop; count CUDA contexts."""

from __future__ import annotations

import math
import os

import torch

import dstrial
from dstrial.doctor.training.programs.program import Program, deepspeed_config
from dstrial.doctor.training.programs.trial import train

_PERIOD, _NUM_BATCHES = 3, 11


def main() -> None:
    """Train, compute, count."""
    program = Program("layers")
    layers = int(program.arguments.layers)
    shape = {"width": 8, "num_layers": layers, "num_heads": 1, "block_size": 8}
    program.note(doing="training with checkpoints")
    trial, run_dir = train(
        {"deepspeed_config": deepspeed_config(0), "shape": shape, "num_blocks": 64},
        _NUM_BATCHES,
        checkpoint_period=dstrial.Batch(_PERIOD),
    )
    losses = [float(loss) for loss in trial.losses]
    device = next(trial.model.parameters()).device
    summed = float(torch.ones(1 << 20, device=device).sum())
    assert summed == 1 << 20, summed
    program.note(
        doing="",
        finite=all(map(math.isfinite, losses)),
        num_tensors=sum(1 for _ in trial.model.parameters()),
        num_saves=len(list(run_dir.glob("checkpoints/*/COMPLETE"))),
        contexts=contexts() if device.type == "cuda" else 0,
    )


def contexts() -> int:
    """Return how many devices NVML sees this process on; 0 if process ids differ."""
    import pynvml

    pynvml.nvmlInit()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(idx) for idx in range(pynvml.nvmlDeviceGetCount())]
        seen = [
            [one.pid for one in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)] for handle in handles
        ]
    except pynvml.NVMLError:
        return 0
    finally:
        pynvml.nvmlShutdown()
    return sum(pids.count(os.getpid()) for pids in seen)


if __name__ == "__main__":
    main()
