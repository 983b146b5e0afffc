"""What ``start.py`` trains: a small net on scikit-learn's digits, and the marks that its ranks leave."""

from __future__ import annotations

import json
import os
import pathlib
import resource
import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

MICRO_BATCH_SIZE = 32
NUM_BATCHES = 20
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


def note_first_batch() -> None:
    """Write down, once, what this rank has spent until its first batch. Ranks: each its own."""
    path = pathlib.Path(os.environ["DSTRIAL_START_MARKS"]) / f"{os.environ['RANK']}.json"
    if path.exists():
        return
    used = resource.getrusage(resource.RUSAGE_SELF)
    marks = {"at_s": time.time(), "cpu_s": used.ru_utime + used.ru_stime, "rss_mib": used.ru_maxrss / 1024}
    path.write_text(json.dumps(marks))
