"""Tiny models, data and DeepSpeed configs that the programs in this folder share."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn

MICRO_BATCH_SIZE = 4
ACCUMULATION_STEPS = 2


class Classifier(nn.Module):
    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.first = nn.Linear(6, 9)
        self.norm = norm(9)
        self.dropout = nn.Dropout(0.2)
        self.second = nn.Linear(9, 9)
        self.last = nn.Linear(9, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.dropout(self.norm(torch.relu(self.first(x))))
        return self.last(torch.relu(self.second(x)))


def ds_config(zero_stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": MICRO_BATCH_SIZE,
        "gradient_accumulation_steps": ACCUMULATION_STEPS,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 1e-3, "warmup_max_lr": 1e-2, "warmup_num_steps": 5},
        },
        "zero_optimization": {"stage": zero_stage},
        "steps_per_print": 1_000_000,
        **more,
    }


def cross_entropy(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs.float(), labels)


def scaled_by_weight(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(layer(x))


def pipeline(num_stages: int = 2, *, kind: str = "plain") -> PipelineModule:
    if kind == "tied":
        middle = [
            TiedLayerSpec("shared", nn.Linear, 9, 9, forward_fn=scaled_by_weight),
            LayerSpec(nn.ReLU),
            TiedLayerSpec("shared", nn.Linear, 9, 9, forward_fn=scaled_by_weight),
        ]
    else:
        middle = [LayerSpec(nn.Linear, 9, 9), LayerSpec(nn.ReLU), LayerSpec(nn.Linear, 9, 9)]
    return PipelineModule(
        [LayerSpec(nn.Linear, 6, 9), LayerSpec(nn.Dropout, 0.2), *middle, LayerSpec(nn.Linear, 9, 3)],
        num_stages=num_stages,
        loss_fn=cross_entropy,
        partition_method="uniform",
        seed_layers=kind == "seeded",
        seed_fn=seed_torch if kind == "seeded" else None,
    )


def seed_torch(seed: int) -> None:
    torch.manual_seed(int(seed))


def micro_batch(
    step: int, micro_batch_idx: int, replica: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro_batch_idx + replica)
    x = torch.randn(MICRO_BATCH_SIZE, 6, generator=generator).to(dtype)
    return x, torch.randint(0, 3, (MICRO_BATCH_SIZE,), generator=generator)


def training_data(
    first_step: int, last_step: int, replica: int, dtype: torch.dtype
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for step in range(first_step, last_step):
        for micro_batch_idx in range(ACCUMULATION_STEPS):
            yield micro_batch(step, micro_batch_idx, replica, dtype)


def validation_set(num_records: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(77)
    x = torch.randn(num_records, 6, generator=generator)
    return x, torch.randint(0, 3, (num_records,), generator=generator)


def digest(engine: Any) -> str:
    """Return a checksum of this rank's weights (partitions in ZeRO 3) and buffers."""
    found = hashlib.sha256()
    for name, param in engine.module.named_parameters():
        found.update(name.encode())
        tensor = param.ds_tensor if hasattr(param, "ds_tensor") else param
        found.update(tensor.detach().float().numpy().tobytes())
    for name, buffer in engine.module.named_buffers():
        found.update(name.encode())
        found.update(buffer.detach().double().numpy().tobytes())
    return found.hexdigest()
