"""Trials whose checkpoints hold every kind of state; ranks dump os.environ."""

import json
import os
import pathlib
import random
import time

import deepspeed
import numpy as np
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn

from dstrial import DataLoader, DeepSpeedTrial, PyTorchCallback


class Records(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, record_idx):
        features = torch.full((8,), record_idx / 24)
        return features, features[:4]


def hold(batch_idx, deadline_s=300):
    """Wait before batch ``HOLD_AT`` until file ``HOLD_UNTIL`` exists, if both are set."""
    if os.environ.get("HOLD_AT") == str(batch_idx):
        give_up_at_s = time.monotonic() + deadline_s
        while not pathlib.Path(os.environ["HOLD_UNTIL"]).exists():
            assert time.monotonic() < give_up_at_s, "nobody lets this trial go on"
            time.sleep(0.1)


class Counter(PyTorchCallback):
    """A callback with state in checkpoints: the number of epochs and random numbers."""

    def __init__(self):
        self.num_epochs = 0

    def on_training_epoch_end(self, epoch_idx):
        self.num_epochs += 1

    def state_dict(self):
        return {"num_epochs": self.num_epochs, "noise": [random.random(), float(np.random.rand())]}

    def load_state_dict(self, state_dict):
        self.num_epochs = state_dict["num_epochs"]


class DataParallelTrial(DeepSpeedTrial):
    def __init__(self, context):
        self.context = context
        output = os.environ.get("GOLDEN_OUTPUT")
        if output:
            rank = context.distributed.get_rank()
            pathlib.Path(output, f"rank_{rank}.json").write_text(json.dumps(dict(os.environ)))
        self.engine = context.wrap_model_engine(self.build_engine(context.get_hparam("deepspeed_config")))

    def build_engine(self, config):
        torch.manual_seed(11)
        model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Tanh(), nn.Linear(16, 4))
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        return engine

    def build_training_data_loader(self):
        return DataLoader(
            Records(), batch_size=self.context.get_train_micro_batch_size_per_gpu(), shuffle=True
        )

    def build_validation_data_loader(self):
        return DataLoader(Records(), batch_size=self.context.get_train_micro_batch_size_per_gpu())

    def build_callbacks(self):
        return {"counter": Counter()}

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        hold(batch_idx)
        features, targets = self.context.to_device(next(dataloader_iter))
        loss = nn.functional.mse_loss(self.engine(features), targets)
        self.engine.backward(loss)
        self.engine.step()
        return {"loss": loss, "batch_idx": batch_idx}

    def evaluate_batch(self, dataloader_iter, batch_idx):
        features, targets = self.context.to_device(next(dataloader_iter))
        return {"validation_loss": nn.functional.mse_loss(self.engine(features), targets)}


def pipeline_loss(outputs, targets):
    return nn.functional.mse_loss(outputs, targets)


class PipelineTrial(DataParallelTrial):
    def build_engine(self, config):
        torch.manual_seed(11)
        layers = [LayerSpec(nn.Linear, 8, 16), LayerSpec(nn.Tanh), LayerSpec(nn.Linear, 16, 4)]
        module = PipelineModule(layers, num_stages=2, loss_fn=pipeline_loss, partition_method="uniform")
        parameters = [one for one in module.parameters() if one.requires_grad]
        engine, *_ = deepspeed.initialize(model=module, model_parameters=parameters, config=config)
        return engine

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        return {"loss": self.engine.train_batch(dataloader_iter)}

    def evaluate_batch(self, dataloader_iter, batch_idx):
        return {"validation_loss": self.engine.eval_batch(dataloader_iter)}
