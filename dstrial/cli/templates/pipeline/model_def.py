"""Train a classifier on two pipeline stages. Replace layers and data."""

import deepspeed
import torch
from deepspeed.pipe import PipelineModule
from torch import nn
from torch.utils.data import TensorDataset

from dstrial import DataLoader, DeepSpeedTrial


def points(number: int, seed: int) -> TensorDataset:
    xy = 2 * torch.rand(number, 2, generator=torch.Generator().manual_seed(seed)) - 1
    return TensorDataset(xy, (xy.norm(dim=1) < 0.8).long())  # label 1: inside the circle


class PipelineTrial(DeepSpeedTrial):
    def __init__(self, context):
        self.context = context
        width = context.get_hparam("width")
        layers = [nn.Linear(2, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2)]
        model = PipelineModule(layers, num_stages=2, loss_fn=nn.functional.cross_entropy)
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=context.get_deepspeed_config()
        )
        self.engine = context.wrap_model_engine(engine)
        self.batch_size = context.get_train_micro_batch_size_per_gpu()

    def build_training_data_loader(self):
        return DataLoader(points(4096, seed=1), batch_size=self.batch_size, shuffle=True)

    def build_validation_data_loader(self):
        return DataLoader(points(1024, seed=2), batch_size=self.batch_size)

    def train_batch(self, batches, epoch_idx, batch_idx):
        return {"loss": self.engine.train_batch(batches)}  # all micro batches of a batch

    def evaluate_batch(self, batches, batch_idx):
        return {"validation_loss": self.engine.eval_batch(batches)}
