"""Models for the dry-run tests, imported by the dry-run processes."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Tower(nn.Module):
    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(next(self.parameters()).dtype)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.kind == "checkpoints" else block(x)
        if self.kind == "values":
            x = x[x > 0]
        if self.kind == "reads":
            x = x * (2.0 if x.sum().item() > 0 else 1.0)
        if self.kind == "raises":
            raise ValueError("out of paint")
        if self.kind == "sleeps":
            time.sleep(600)
        return x.mean()


def tower(kind: str = "plain", width: int = 64) -> Tower:
    return Tower(kind, width)


def records(num_records: int, width: int = 64, **_rest: Any) -> tuple[torch.Tensor]:
    return (torch.rand(num_records, width),)
