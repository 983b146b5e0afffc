"""A trial for living workers that fails as its hyperparameter ``fault`` says."""

import os
import time

import deepspeed
import torch
from torch import nn
from torch.utils.data import TensorDataset

from dstrial import DataLoader, DeepSpeedTrial, overwrite_deepspeed_config

_kept: list[torch.Tensor] = []


class WorkedTrial(DeepSpeedTrial):
    def __init__(self, context) -> None:
        self.context = context
        hparams = context.get_hparams()
        self.fault = hparams["fault"] if context.distributed.rank == 1 else ""
        self.linear_of_torch = nn.functional.linear
        model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))
        engine, _, _, _ = deepspeed.initialize(
            model=model,
            model_parameters=model.parameters(),
            config=overwrite_deepspeed_config(
                hparams["deepspeed_config"], hparams["overwrite_deepspeed_args"]
            ),
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
        if self.fault == "keeps memory":
            _kept.append(torch.zeros(2**20))
        records, targets = self.context.to_device(next(dataloader_iter))
        loss = nn.functional.mse_loss(self.engine(records), targets)
        self.engine.backward(loss)
        self.engine.step()
        return {"loss": loss}

    def evaluate_batch(self, dataloader_iter, batch_idx):
        raise NotImplementedError
