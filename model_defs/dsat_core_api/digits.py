"""Network, data and process group of the scripts ``plain.py`` and ``train.py``."""

import deepspeed
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from dstrial.ranks.process_group import without_compiled_collectives

NUM_CLASSES = 10


def init_ranks() -> None:
    """Create the process group; on a CPU, DeepSpeed's collectives are not compiled."""
    with without_compiled_collectives(is_cpu=not torch.cuda.is_available()):
        deepspeed.init_distributed()


def build_model(width: int, depth: int) -> nn.Module:
    """Build a network that maps images (batch, 64) to logits (batch, 10)."""
    layers: list[nn.Module] = [nn.Linear(64, width), nn.GELU()]
    for _ in range(depth - 1):
        layers += [nn.Linear(width, width), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(width, NUM_CLASSES))


def load_training_set() -> TensorDataset:
    """Return a data set of pairs: image (64,) in 0..1, and label."""
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16.0
    return TensorDataset(images, torch.tensor(digits.target, dtype=torch.long))
