"""A data-parallel trial that prints exact losses as hexadecimal floats."""

from __future__ import annotations

import os
import time
from typing import Any

import deepspeed
import torch
from torch.utils.data import TensorDataset

import dstrial

SIZE = 16


def layers() -> list[torch.nn.Module]:
    """Return the model's layers, always with the same weights."""
    torch.manual_seed(1)
    return [
        torch.nn.Linear(SIZE, SIZE),
        torch.nn.Tanh(),
        torch.nn.Linear(SIZE, SIZE),
        torch.nn.Linear(SIZE, 1),
    ]


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the mean squared error."""
    return torch.nn.functional.mse_loss(output, target)


class SmallTrial(dstrial.DeepSpeedTrial):
    """Trains on random records, and sleeps ``pause_s`` seconds before each batch."""

    def __init__(self, context: dstrial.DeepSpeedTrialContext) -> None:
        self.context = context
        hparams = context.get_hparams()
        self.pause_s = float(hparams["pause_s"])
        config: dict[str, Any] = {
            "train_batch_size": 12,
            "train_micro_batch_size_per_gpu": int(hparams.get("micro_batch_size", 6)),
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
            "zero_optimization": {"stage": hparams["zero_stage"]},
        }
        model = self.make_model()
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        self.engine = context.wrap_model_engine(engine)

    def make_model(self) -> torch.nn.Module:
        """Return the model; a subclass returns a pipeline."""
        return torch.nn.Sequential(*layers())

    def build_training_data_loader(self) -> dstrial.DataLoader:
        """Return a loader of 4,800 records, always the same."""
        made = torch.Generator().manual_seed(0)
        inputs = torch.randn(4800, SIZE, generator=made)
        batch_size = self.engine.train_micro_batch_size_per_gpu()
        return dstrial.DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=batch_size)

    def build_validation_data_loader(self) -> dstrial.DataLoader:
        """Return a loader of the training records."""
        return self.build_training_data_loader()

    def train_batch(self, iterator: Any, epoch_idx: int, batch_idx: int) -> dict[str, torch.Tensor]:
        """Train one batch; raise ValueError if file ``fail-HOSTNAME`` exists."""
        time.sleep(self.pause_s)
        if os.path.exists(f"fail-{os.uname().nodename}"):  # noqa: PTH110  # short
            raise ValueError("asked to fail")
        loss = self.step(iterator)
        if self.context.distributed.rank == 0 and batch_idx % 5 == 4:
            print(f"batch {batch_idx + 1} loss {float(loss).hex()}", flush=True)  # tests parse this line
        return {"loss": loss}

    def step(self, iterator: Any) -> torch.Tensor:
        """Train one batch and return its loss."""
        inputs, targets = self.context.to_device(next(iterator))
        loss = loss_of(self.engine(inputs), targets)
        self.engine.backward(loss)
        self.engine.step()
        return loss.detach()

    def evaluate_batch(self, iterator: Any, batch_idx: int) -> dict[str, float]:
        """Return metric ``zero``, which is always 0."""
        next(iterator)
        return {"zero": 0.0}
