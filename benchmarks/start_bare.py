"""The baseline of ``start.py``: a plain DeepSpeed script, as torchrun starts it."""

from __future__ import annotations

import os
import pathlib

import deepspeed
import start_marks
import start_model
import torch
from torch.utils.data import DataLoader, DistributedSampler


def main() -> None:
    """Train as many batches as the trial does, and save once. Ranks: all, collectively."""
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    model = start_model.digits_net()
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=start_model.DS_CONFIG
    )
    records = start_model.digits()
    loader = DataLoader(records, batch_size=start_model.MICRO_BATCH_SIZE, sampler=DistributedSampler(records))
    for _, (images, labels) in zip(range(start_marks.NUM_BATCHES), loader, strict=False):
        start_marks.note_first_batch()
        loss = torch.nn.functional.cross_entropy(engine(images), labels)
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint(str(pathlib.Path(os.environ["DSTRIAL_START_MARKS"]) / "checkpoint"))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
