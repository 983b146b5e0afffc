"""The smallest training of ``start.py``: a net on scikit-learn's digits."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

MICRO_BATCH_SIZE = 32
DS_CONFIG = {
    "train_micro_batch_size_per_gpu": MICRO_BATCH_SIZE,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
    "steps_per_print": 1_000_000,
}


def digits_net() -> nn.Module:
    """Return logits (batch, 10) of images (batch, 64)."""
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.25), nn.Linear(128, 10))


def digits() -> TensorDataset:
    """Return (image (64,) in 0..1, label) pairs."""
    found = load_digits()
    return TensorDataset(
        torch.tensor(found.data, dtype=torch.float32) / 16.0, torch.tensor(found.target, dtype=torch.long)
    )
