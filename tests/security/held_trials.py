"""A trial that waits in its second batch until the file ``go`` exists."""

import os
import pathlib
import sys
import time

import deepspeed
import torch
from torch import nn
from torch.utils.data import TensorDataset

import dstrial
from dstrial import DataLoader, DeepSpeedTrial

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
}


class HeldTrial(DeepSpeedTrial):
    def __init__(self, context) -> None:
        self.context = context
        self.directory = pathlib.Path(context.get_hparams()["held_in"])
        self.num_batches = 0
        model = nn.Linear(8, 1)
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
        self.engine = context.wrap_model_engine(engine)

    def build_training_data_loader(self) -> DataLoader:
        return DataLoader(TensorDataset(torch.randn(64, 8), torch.randn(64, 1)), batch_size=4)

    build_validation_data_loader = build_training_data_loader

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        records, targets = self.context.to_device(next(dataloader_iter))
        loss = nn.functional.mse_loss(self.engine(records), targets)
        self.engine.backward(loss)
        self.engine.step()
        self.num_batches += 1
        if self.num_batches == 2:
            hold(self.directory)
        return {"loss": loss}

    def evaluate_batch(self, dataloader_iter, batch_idx):
        return {"validation_loss": 0.0}


def hold(directory) -> None:
    name = f"held.{os.environ['RANK']}.pid"
    (directory / f"{name}.new").write_text(str(os.getpid()))
    (directory / f"{name}.new").replace(directory / name)
    give_up_at_s = time.monotonic() + 120
    while not (directory / "go").exists() and time.monotonic() < give_up_at_s:
        time.sleep(0.05)


def main() -> None:
    exp_conf = {"name": "held", "searcher": {"name": "single", "metric": "validation_loss"}}
    with dstrial.init(
        hparams={"held_in": sys.argv[1], "deepspeed_config": CONFIG}, exp_conf=exp_conf
    ) as context:
        dstrial.Trainer(HeldTrial(context), context).fit(
            max_length=dstrial.Batch(4), checkpoint_policy="none"
        )


if __name__ == "__main__":
    main()
