"""A generative adversarial network on the digits: two DeepSpeed engines in one trial, accumulated by hand."""

import deepspeed
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from dstrial import DataLoader, DeepSpeedTrial, DeepSpeedTrialContext, overwrite_deepspeed_config

NUM_PIXELS = 64
NUM_VALIDATION_RECORDS = 297  # of 1,797


def build_generator(noise_size: int, num_hidden: int) -> nn.Module:
    """Build a network that maps noise (batch, noise_size) to images (batch, 64) in -1..1."""
    return nn.Sequential(
        nn.Linear(noise_size, num_hidden),
        nn.ReLU(),
        nn.Linear(num_hidden, num_hidden),
        nn.ReLU(),
        nn.Linear(num_hidden, NUM_PIXELS),
        nn.Tanh(),
    )


def build_discriminator(num_hidden: int, dropout: float) -> nn.Module:
    """Build a network that maps images (batch, 64) to logits (batch, 1), positive for "real"."""
    return nn.Sequential(
        nn.Linear(NUM_PIXELS, num_hidden),
        nn.LeakyReLU(0.2),
        nn.Dropout(dropout),
        nn.Linear(num_hidden, num_hidden),
        nn.LeakyReLU(0.2),
        nn.Dropout(dropout),
        nn.Linear(num_hidden, 1),
    )


def load_splits(split_seed: int) -> tuple[TensorDataset, TensorDataset]:
    """Return (training, validation) sets of images (64,) in -1..1; labels are not used."""
    images = torch.tensor(load_digits().data, dtype=torch.float32) / 8.0 - 1.0
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(split_seed))
    validation, training = order[:NUM_VALIDATION_RECORDS], order[NUM_VALIDATION_RECORDS:]
    return TensorDataset(images[training]), TensorDataset(images[validation])


def judge(logits: torch.Tensor, is_real: bool) -> torch.Tensor:
    """Return the loss of a discriminator's ``logits`` on images that are all real or all generated."""
    targets = torch.full_like(logits, 1.0 if is_real else 0.0)
    return nn.functional.binary_cross_entropy_with_logits(logits, targets)


class DigitsGanTrial(DeepSpeedTrial):
    """Trains a generator against a discriminator.

    Training reports ``generator_loss`` and ``discriminator_loss``. Validation compares real images with as many generated
    ones. ``coverage_distance`` is the mean distance from a real image to the nearest generated one. ``realism_distance`` is the
    mean distance from a generated image to the nearest real one. If the generator makes noise, both are large. If it always
    makes the same digit, only the first is large.
    """

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        self.context = context
        hparams = context.get_hparams()
        self.noise_size = hparams["noise_size"]
        overwrites = hparams.get("overwrite_deepspeed_args", {})

        generator = build_generator(self.noise_size, hparams["num_hidden"])
        generator_engine, _, _, _ = deepspeed.initialize(
            model=generator,
            model_parameters=generator.parameters(),
            config=overwrite_deepspeed_config(hparams["deepspeed_config"], overwrites),
        )
        discriminator = build_discriminator(hparams["num_hidden"], hparams["dropout"])
        discriminator_engine, _, _, _ = deepspeed.initialize(
            model=discriminator,
            model_parameters=discriminator.parameters(),
            config=overwrite_deepspeed_config(hparams["discriminator_deepspeed_config"], overwrites),
        )
        self.generator = context.wrap_model_engine(generator_engine)
        self.discriminator = context.wrap_model_engine(discriminator_engine)

        # One call of train_batch is one batch: the loop over micro batches is in train_batch below.
        context.disable_auto_grad_accumulation()
        self.training_set, self.validation_set = load_splits(hparams["split_seed"])

    def build_training_data_loader(self) -> DataLoader:
        return DataLoader(
            self.training_set,
            batch_size=self.context.get_train_micro_batch_size_per_gpu(),
            shuffle=True,
            drop_last=True,
        )

    def build_validation_data_loader(self) -> DataLoader:
        return DataLoader(self.validation_set, batch_size=100)

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        discriminator_losses = []
        generator_losses = []
        for _ in range(self.context.get_num_micro_batches_per_slot()):
            (real,) = self.context.to_device(next(dataloader_iter))
            discriminator_losses.append(self.train_discriminator(real))
            generator_losses.append(self.train_generator(len(real)))
        return {
            "discriminator_loss": torch.stack(discriminator_losses).mean(),
            "generator_loss": torch.stack(generator_losses).mean(),
        }

    def train_discriminator(self, real):
        with torch.no_grad():
            generated = self.generator(self.draw_noise(len(real)))
        logits = self.discriminator(torch.cat([real, generated]))
        loss = 0.5 * (judge(logits[: len(real)], is_real=True) + judge(logits[len(real) :], is_real=False))
        self.discriminator.backward(loss)
        self.discriminator.step()
        return loss.detach()

    def train_generator(self, num_records):
        # The generator's loss flows through the discriminator's module, not its engine, and leaves no
        # gradients there: those would be counted into the discriminator's next step.
        self.discriminator.module.requires_grad_(False)
        generated = self.generator(self.draw_noise(num_records))
        loss = judge(self.discriminator.module(generated), is_real=True)
        self.generator.backward(loss)
        self.generator.step()
        self.discriminator.module.requires_grad_(True)
        return loss.detach()

    def evaluate_batch(self, dataloader_iter, batch_idx):
        (real,) = self.context.to_device(next(dataloader_iter))
        # A separate random generator makes validation repeatable, and does not change the random numbers of training.
        noise = torch.randn(len(real), self.noise_size, generator=torch.Generator().manual_seed(batch_idx))
        distances = torch.cdist(real, self.generator(self.context.to_device(noise)))
        return {
            "coverage_distance": distances.min(dim=1).values.mean(),
            "realism_distance": distances.min(dim=0).values.mean(),
        }

    def draw_noise(self, num_records):
        return torch.randn(num_records, self.noise_size, device=self.generator.device)
