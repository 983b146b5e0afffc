"""Measure configurations' peaks of allocated device memory, engine by engine."""

from __future__ import annotations

import gc
import json
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator

from dstrial.doctor.training.programs.gpt import batch, model
from dstrial.doctor.training.programs.program import Program, deepspeed_config


def main() -> None:
    """Train three steps of each."""
    program = Program("configurations", "shape", "records")
    program.keep_group()
    shape: dict[str, Any] = json.loads(program.arguments.shape)
    records = int(program.arguments.records)
    device = torch.device(get_accelerator().current_device_name())
    # cuBLAS takes its workspace at the first product, for the life of the process.
    ones = torch.ones(64, 64, device=device)
    for dtype in (torch.float32, torch.bfloat16):
        ones.to(dtype) @ ones.to(dtype)
    found: list[float] = []
    for precision, stage in json.loads(program.arguments.configurations):
        program.note(doing=f"{precision} with ZeRO {stage}", measured_mib=found)
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        found.append(round((_peak(shape, precision, stage, records, device) - before) / 2**20, 1))
        gc.collect()
    program.note(doing="", measured_mib=found)


def _peak(shape: dict[str, Any], precision: str, stage: int, records: int, device: torch.device) -> int:
    net = model(**shape)
    config = deepspeed_config(stage, precision, train_micro_batch_size_per_gpu=records)
    engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
    for _ in range(3):
        loss = engine(*(one.to(device) for one in batch(records, **shape)))
        engine.backward(loss)
        engine.step()
    torch.cuda.synchronize()
    peak = int(torch.cuda.max_memory_allocated())
    engine.destroy()
    return peak


if __name__ == "__main__":
    main()
