"""Trials as users write them; fake tensors cannot run all of them."""

import deepspeed
import torch
from torch import nn
from torch.utils.data import TensorDataset, random_split

from dstrial import DataLoader, DeepSpeedTrial


class Ordinary(DeepSpeedTrial):
    """Splits its data at random, ties two weights, compiles, and reads its loss."""

    compiles = True

    def __init__(self, context):
        self.context = context
        hparams = context.get_hparams()
        width = hparams["width"]
        model = nn.Sequential(
            nn.Embedding(100, width), nn.Linear(width, width), nn.Linear(width, 100, bias=False)
        )
        model[2].weight = model[0].weight
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=hparams["deepspeed_config"]
        )
        if self.compiles:
            engine.compile()
        self.engine = context.wrap_model_engine(engine)
        tokens = torch.randint(0, 100, (60, 16))
        whole = TensorDataset(tokens, tokens.roll(1, dims=1))
        self.training_set, self.validation_set = random_split(whole, [50, 10])

    def build_training_data_loader(self):
        return DataLoader(self.training_set, batch_size=self.context.get_train_micro_batch_size_per_gpu())

    def build_validation_data_loader(self):
        return None

    def loss(self, tokens, labels):
        return nn.functional.cross_entropy(self.engine(tokens).flatten(0, 1), labels.flatten())

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        tokens, labels = self.context.to_device(next(dataloader_iter))
        loss = self.loss(tokens, labels)
        self.engine.backward(loss)
        self.engine.step()
        return {"loss": loss.item()}


class ByValue(Ordinary):
    """Selects labels by value, which fake tensors cannot do."""

    compiles = False

    def loss(self, tokens, labels):
        kept = labels > 3
        return nn.functional.cross_entropy(self.engine(tokens)[kept], labels[kept])


class Broken(Ordinary):
    """Fails with fake and with real tensors."""

    def loss(self, tokens, labels):
        raise ValueError("no loss today")
