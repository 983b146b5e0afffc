"""The trial that checks train: a small GPT configured by hyperparameters alone."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import deepspeed
import torch

import dstrial
from dstrial.doctor.training.programs.gpt import blocks, model
from dstrial.trial.context import runtime_of

FAULT_VARIABLE = "TRAINING_CHECK_FAULT"
"""``kind:rank:batch``: what a rank does inside of a batch's step: ``kill`` itself, or take all ``memory``."""
FAULT_TIME_VARIABLE = "TRAINING_CHECK_FAULT_TIME"
"""File in which the rank notes when, seconds since the epoch."""

_GIB = 2**30


class TextTrial(dstrial.DeepSpeedTrial):
    """Trains the GPT of hyperparameter ``shape`` under ``deepspeed_config``.

    Further hyperparameters: ``num_blocks`` of text, ``num_workers`` of the loader, ``compiles`` the model.

    Attributes:
        losses: of the micro batches, as tensors on the device.
    """

    def __init__(self, context: dstrial.DeepSpeedTrialContext) -> None:
        self.context = context
        self.hparams = dict(context.get_hparams())
        self.shape = dict(self.hparams.get("shape") or {})
        torch.manual_seed(11)
        self.model = model(**self.shape)
        if self.hparams.get("compiles"):
            self.model.compile()
        engine, *_ = deepspeed.initialize(
            model=self.model,
            model_parameters=self.model.parameters(),
            config=dstrial.overwrite_deepspeed_config(
                self.hparams["deepspeed_config"], self.hparams.get("overwrite_deepspeed_args") or {}
            ),
        )
        self.engine = context.wrap_model_engine(engine)
        self.losses: list[torch.Tensor] = []

    def build_training_data_loader(self) -> dstrial.DataLoader:
        """Return the text, shuffled."""
        return self._loader(int(self.hparams.get("num_blocks") or 256), shuffle=True)

    def build_validation_data_loader(self) -> dstrial.DataLoader:
        """Return a little of the text."""
        return self._loader(8, shuffle=False)

    def _loader(self, num_blocks: int, *, shuffle: bool) -> dstrial.DataLoader:
        workers = int(self.hparams.get("num_workers") or 0)
        more: dict[str, Any] = {"multiprocessing_context": "forkserver"} if workers else {}
        if self.hparams.get("pin_memory"):
            more["pin_memory"] = True
        return dstrial.DataLoader(
            blocks(num_blocks, int(self.shape.get("block_size") or 32)),
            batch_size=self.context.get_train_micro_batch_size_per_gpu(),
            shuffle=shuffle,
            drop_last=shuffle,
            num_workers=workers,
            **more,
        )

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        """Train one micro batch."""
        del epoch_idx
        characters, following = self.context.to_device(next(dataloader_iter))
        loss = self.engine(characters, following)
        fail_if_asked(self.context.distributed.get_rank(), batch_idx, self.context.device)
        self.engine.backward(loss)
        self.engine.step()
        self.losses.append(loss.detach())
        return {"loss": loss}

    def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:
        """Evaluate one micro batch."""
        del batch_idx
        characters, following = self.context.to_device(next(dataloader_iter))
        return {"validation_loss": self.engine(characters, following)}


def fail_if_asked(rank: int, batch_idx: int, device: torch.device) -> None:
    """Do what ``TRAINING_CHECK_FAULT`` says, if it is this rank's turn."""
    kind, _, where = os.environ.get(FAULT_VARIABLE, "").partition(":")
    if not kind or where != f"{rank}:{batch_idx}":
        return
    path = os.environ.get(FAULT_TIME_VARIABLE)
    if path:
        Path(path).write_text(str(time.time()), encoding="utf-8")
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    held = []
    while device.type != "cpu":
        held.append(torch.empty(_GIB, dtype=torch.uint8, device=device))
    # No machine has that much; torch's allocator refuses it at once, as it does when memory runs out.
    torch.empty(2**60, dtype=torch.uint8)


def train(
    hparams: Mapping[str, Any],
    num_batches: int,
    *,
    run_dir: Path | None = None,
    trial_class: type[TextTrial] = TextTrial,
    **fit: Any,
) -> tuple[TextTrial, Path]:
    """Train a trial in this process, through ``dstrial.init`` and ``Trainer``.

    Args:
        hparams: of the trial.
        num_batches: until when.
        run_dir: an earlier run to go on with, from its latest checkpoint; None begins one.
        trial_class: what is trained.
        fit: further arguments of ``Trainer.fit``.

    Returns:
        The trial, and the run's directory.

    Ranks: all, collectively.
    """
    conf = {"name": "doctor", "reproducibility": {"experiment_seed": 3}}
    with dstrial.init(
        hparams=dict(hparams),
        exp_conf=conf,
        run_dir=run_dir,
        latest_checkpoint=None if run_dir is None else "latest",
        enable_tensorboard_logging=False,
    ) as context:
        trial = trial_class(context)
        settings: dict[str, Any] = {
            "reporting_period": dstrial.Batch(num_batches),
            "checkpoint_policy": "none",
            **fit,
        }
        dstrial.Trainer(trial, context).fit(
            max_length=dstrial.Batch(num_batches),
            latest_checkpoint=None if run_dir is None else "latest",
            **settings,
        )
        return trial, Path(runtime_of(context).core.run_directory.path)
