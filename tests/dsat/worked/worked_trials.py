"""A trial with injected faults and knobs."""

import os
import time

import deepspeed
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from dstrial import DataLoader, DeepSpeedTrial, overwrite_deepspeed_config


class Recomputed(nn.Sequential):
    """Keeps nothing but its input for backward."""

    def forward(self, records):
        return checkpoint(super().forward, records, use_reentrant=False)


class WorkedTrial(DeepSpeedTrial):
    def __init__(self, context) -> None:
        self.context = context
        hparams = context.get_hparams()
        is_everywhere = hparams["fault"] in ("user error", "bad config", "numeric", "disk full")
        self.fault = hparams["fault"] if is_everywhere or context.distributed.rank == 1 else ""
        layers = [nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1)]
        knob = hparams.get("knob")
        model = Recomputed(*layers) if knob == "recomputes" else nn.Sequential(*layers)
        config = overwrite_deepspeed_config(hparams["deepspeed_config"], hparams["overwrite_deepspeed_args"])
        if self.fault == "bad config":
            config["zero_optimization"]["stage"] = 7
        engine, _, _, _ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=config
        )
        self.engine = context.wrap_model_engine(engine)

    def build_training_data_loader(self) -> DataLoader:
        data = TensorDataset(torch.randn(256, 32), torch.randn(256, 1))
        return DataLoader(data, batch_size=self.context.get_train_micro_batch_size_per_gpu())

    build_validation_data_loader = build_training_data_loader

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        if self.fault == "out of memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB. GPU 0 has")
        if self.fault == "hangs":
            time.sleep(600)
        if self.fault == "killed":
            os.kill(os.getpid(), 9)
        if self.fault == "host out of memory":
            torch.empty(2**50)
        if self.fault == "dies":
            os._exit(3)
        if self.fault == "disk full":
            with open("/dev/full", "w") as file:
                file.write("x")
        records, targets = self.context.to_device(next(dataloader_iter))
        loss = nn.functional.mse_loss(self.engine(records), targets)
        if self.fault == "numeric":
            loss = loss * float("nan")
        if self.fault == "user error":
            raise KeyError("no such metric")
        self.engine.backward(loss)
        self.engine.step()
        return {"loss": loss}

    def evaluate_batch(self, dataloader_iter, batch_idx):
        raise NotImplementedError
