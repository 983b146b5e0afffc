"""Classify handwritten digits with a wide multilayer network: a DeepSpeedTrial that dsat tunes without changes."""

import deepspeed
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from dstrial import DataLoader, DeepSpeedTrial, DeepSpeedTrialContext, overwrite_deepspeed_config

NUM_CLASSES = 10
NUM_VALIDATION_RECORDS = 360  # of 1,797


def build_model(width: int, depth: int) -> nn.Module:
    """Build a network that maps images (batch, 64) to logits (batch, 10)."""
    layers: list[nn.Module] = [nn.Linear(64, width), nn.GELU()]
    for _ in range(depth - 1):
        layers += [nn.Linear(width, width), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(width, NUM_CLASSES))


def load_splits() -> tuple[TensorDataset, TensorDataset]:
    """Return the training and validation sets of pairs: image (64,) in 0..1, and label."""
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16.0
    labels = torch.tensor(digits.target, dtype=torch.long)
    held_out = slice(0, NUM_VALIDATION_RECORDS)
    trained = slice(NUM_VALIDATION_RECORDS, None)
    return TensorDataset(images[trained], labels[trained]), TensorDataset(images[held_out], labels[held_out])


class DigitsTrial(DeepSpeedTrial):
    """Trains the network; reports ``loss``, ``validation_loss`` and ``validation_accuracy``."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        self.context = context
        hparams = context.get_hparams()
        model = build_model(hparams["width"], hparams["depth"])
        engine, _, _, _ = deepspeed.initialize(
            model=model,
            model_parameters=model.parameters(),
            config=overwrite_deepspeed_config(
                hparams["deepspeed_config"], hparams.get("overwrite_deepspeed_args", {})
            ),
        )
        self.model_engine = context.wrap_model_engine(engine)
        self.training_set, self.validation_set = load_splits()

    def build_training_data_loader(self) -> DataLoader:
        return DataLoader(
            self.training_set,
            batch_size=self.context.get_train_micro_batch_size_per_gpu(),
            shuffle=True,
            drop_last=True,
        )

    def build_validation_data_loader(self) -> DataLoader:
        return DataLoader(self.validation_set, batch_size=self.context.get_train_micro_batch_size_per_gpu())

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        images, labels = self.context.to_device(next(dataloader_iter))
        loss = nn.functional.cross_entropy(self.model_engine(images), labels)
        self.model_engine.backward(loss)
        self.model_engine.step()
        return {"loss": loss}

    def evaluate_batch(self, dataloader_iter, batch_idx):
        images, labels = self.context.to_device(next(dataloader_iter))
        logits = self.model_engine(images)
        return {
            "validation_loss": nn.functional.cross_entropy(logits, labels),
            "validation_accuracy": (logits.argmax(dim=1) == labels).float().mean(),
        }
