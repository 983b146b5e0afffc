"""Handwritten digits, classified by a small convolutional net: data parallel, one DeepSpeed engine."""

import deepspeed
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from dstrial import DataLoader, DeepSpeedTrial, DeepSpeedTrialContext, overwrite_deepspeed_config

NUM_CLASSES = 10
NUM_VALIDATION_RECORDS = 360  # of 1,797


class DigitsNet(nn.Module):
    """Two convolutions, one hidden layer, dropout: logits (batch, 10) from images (batch, 1, 8, 8)."""

    def __init__(self, num_channels: int, dropout: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, num_channels, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(num_channels, 2 * num_channels, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(2 * num_channels * 4 * 4, 64),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(64, NUM_CLASSES),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layers(images)


def load_splits(split_seed: int) -> tuple[TensorDataset, TensorDataset]:
    """Return (training, validation) sets of (image (1, 8, 8) in 0..1, label) pairs.

    The split depends on ``split_seed`` only, so that every trial of a search is measured on the same images.
    """
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16.0
    labels = torch.tensor(digits.target, dtype=torch.long)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(split_seed))
    validation, training = order[:NUM_VALIDATION_RECORDS], order[NUM_VALIDATION_RECORDS:]
    training_set = TensorDataset(images[training], labels[training])
    return training_set, TensorDataset(images[validation], labels[validation])


class DigitsTrial(DeepSpeedTrial):
    """Trains DigitsNet; reports ``loss``, ``validation_loss`` and ``validation_accuracy``."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        self.context = context
        hparams = context.get_hparams()
        model = DigitsNet(hparams["num_channels"], hparams["dropout"])
        engine, _, _, _ = deepspeed.initialize(
            model=model,
            model_parameters=model.parameters(),
            config=overwrite_deepspeed_config(
                hparams["deepspeed_config"], hparams.get("overwrite_deepspeed_args", {})
            ),
        )
        self.model_engine = context.wrap_model_engine(engine)
        self.training_set, self.validation_set = load_splits(hparams["split_seed"])

    def build_training_data_loader(self) -> DataLoader:
        return DataLoader(
            self.training_set,
            batch_size=self.context.get_train_micro_batch_size_per_gpu(),
            shuffle=True,
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
