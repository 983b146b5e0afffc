"""Hugging Face's Trainer as a loop of the loop-overhead benchmark: its own loop, around the step that all loops share.

The Trainer has a model and an optimizer of one parameter, which it takes for those that it trains; the shared step trains
the engine in place of ``training_step``. Loader, logging and what it does between steps are its own. Gradients are not clipped.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import torch
from loop_overhead_step import Step
from loop_overhead_timing import Plan
from torch import nn
from torch.utils import data
from transformers import PrinterCallback, Trainer, TrainingArguments


class StepTrainer(Trainer):
    def __init__(self, step: Step, **options: Any) -> None:
        super().__init__(**options)
        self._step = step

    def training_step(
        self,
        model: nn.Module,  # noqa: ARG002
        inputs: Any,
        num_items_in_batch: Any = None,  # noqa: ARG002
    ) -> torch.Tensor:
        return self._step(iter([inputs])).detach()


def huggingface_loop(
    step: Step, records: data.TensorDataset, micro_batch_size: int, plan: Plan, directory: pathlib.Path
) -> Callable[[], None]:
    """Return its loop, with defaults where the measurement leaves it any. Ranks: all, collectively."""
    model = nn.Linear(1, 1, bias=False)
    arguments = TrainingArguments(
        output_dir=str(directory),
        max_steps=plan.num_batches,
        per_device_train_batch_size=micro_batch_size,
        gradient_accumulation_steps=plan.micro_batches_per_batch,
        max_grad_norm=0.0,
        logging_steps=plan.report_every,
        save_strategy="no",
        report_to=["tensorboard"],
        disable_tqdm=True,
        dataloader_drop_last=True,
        dataloader_pin_memory=False,
        use_cpu=step.device.type == "cpu",
    )
    trainer = StepTrainer(
        step,
        model=model,
        args=arguments,
        train_dataset=records,
        data_collator=lambda pairs: tuple(torch.stack(column) for column in zip(*pairs, strict=True)),
        optimizers=(torch.optim.SGD(model.parameters(), lr=1e-3), None),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer.train
