"""What ``hosts.py`` has ranks train: ZeRO 1 on gloo, a line a step; DeepSpeed alone, nothing of dstrial's."""

from __future__ import annotations

import datetime
import os
import socket
import time

import deepspeed
import torch
import torch.distributed as dist
from deepspeed import ops

vars(ops)["__compatible_ops__"] = {}  # no compilation of a collective for inference
NUM_STEPS, STEP_S = int(os.environ.get("STEPS", "40")), float(os.environ.get("STEP_S", "0.1"))


def main() -> None:
    """Train, and say after each step on which host."""
    deepspeed.init_distributed(
        "gloo", auto_mpi_discovery=False, timeout=datetime.timedelta(seconds=1800), verbose=False
    )
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True},
        "steps_per_print": 1_000_000,
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    where = f"{socket.gethostname()} rank {dist.get_rank()} of {dist.get_world_size()}"
    for step in range(NUM_STEPS):
        loss = engine(torch.randn(2, 64, dtype=torch.bfloat16)).float().pow(2).mean()
        engine.backward(loss)
        engine.step()
        print(f"{where}: step {step}", flush=True)
        time.sleep(STEP_S)
    print(f"{where}: done", flush=True)


if __name__ == "__main__":
    main()
