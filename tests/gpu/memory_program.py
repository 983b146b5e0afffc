"""Measure peak device memory of engines; argument: JSON [[precision, stage], …]."""

import gc
import json
import sys

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from text_runs import config, keep_group, print_facts

from dstrial.doctor.proof_trial import GPT

SHAPE = {"width": 512, "num_layers": 4, "num_heads": 8, "block_size": 256, "is_fused": True}
RECORDS = 8


def model(**shape):
    """Return the model; dry runs import this function and ``batch``."""
    return GPT(**shape)


def batch(micro_batch_size, **shape):
    size = (micro_batch_size, shape["block_size"])
    return torch.zeros(size, dtype=torch.long), torch.zeros(size, dtype=torch.long)


def peak_of(precision, stage, device):
    net = model(**SHAPE)
    sections = {"train_micro_batch_size_per_gpu": RECORDS}
    engine, *_ = deepspeed.initialize(
        model=net, model_parameters=net.parameters(), config=config(stage, precision, **sections)
    )
    for _ in range(3):
        loss = engine(*(one.to(device) for one in batch(RECORDS, **SHAPE)))
        engine.backward(loss)
        engine.step()
    torch.cuda.synchronize()
    peak = int(torch.cuda.max_memory_allocated())
    engine.destroy()
    return peak


def main():
    keep_group()
    device = torch.device(get_accelerator().current_device_name())
    # cuBLAS allocates its workspace at the first matmul and keeps it.
    ones = torch.ones(64, 64, device=device)
    for dtype in (torch.float32, torch.bfloat16):
        ones.to(dtype) @ ones.to(dtype)
    found = []
    for precision, stage in json.loads(sys.argv[1]):
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        found.append(peak_of(precision, stage, device) - before)
    print_facts(peaks=found)


if __name__ == "__main__":
    main()
