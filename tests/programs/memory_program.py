"""Measure memory use of one batch on real engines for ``test_memory_of_engines``."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Iterator
from typing import Any

import deepspeed
import torch
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from torch import nn

from dstrial.telemetry.instruments import Instruments

WIDTH = 64
RECORDS = 32


class Layers(nn.Module):
    """Two linear layers with names that tensor parallelism recognises."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down_proj = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, records: torch.Tensor) -> torch.Tensor:
        return self.down_proj(torch.tanh(self.up_proj(records)))


class MeanSquare(Layers):
    """The layers with their loss, for a dry run."""

    def forward(self, records: torch.Tensor) -> torch.Tensor:
        return super().forward(records.to(self.up_proj.weight.dtype)).pow(2).mean()


def layers() -> nn.Module:
    return MeanSquare()


def records(num_records: int) -> tuple[torch.Tensor]:
    return (torch.randn(num_records, WIDTH, dtype=torch.bfloat16),)


class Mixture(nn.Module):
    """The layers, followed by two experts of the same kind on two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = Layers()
        self.experts = MoE(WIDTH, Layers(), num_experts=2, ep_size=2, k=1, min_capacity=RECORDS)

    def forward(self, records: torch.Tensor) -> torch.Tensor:
        output, loss, _ = self.experts(self.layers(records))
        return output + 0 * loss


class MixtureLoss(Mixture):
    """The mixture with its loss, for a dry run."""

    def forward(self, records: torch.Tensor) -> torch.Tensor:
        return super().forward(records.to(self.layers.up_proj.weight.dtype)).pow(2).mean()


def mixture() -> nn.Module:
    return MixtureLoss()


def measured(options: dict[str, Any], rank: int) -> dict[str, Any]:
    torch.manual_seed(1)
    config = {
        "train_micro_batch_size_per_gpu": RECORDS,
        "gradient_accumulation_steps": options.get("accumulation", 1),
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_optimization": {
            "stage": options["stage"],
            "reduce_bucket_size": 4096,
            **options.get("zero", {}),
        },
        **options.get("more", {}),
    }
    model: nn.Module = Mixture() if options.get("is_mixture") else Layers()
    groups: Any = model.parameters()
    if options.get("is_mixture"):
        groups = split_params_into_different_moe_groups_for_optimizer(
            {"params": [*model.parameters()], "name": "all"}
        )
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config)
    dtype = next(engine.module.parameters()).dtype
    instruments = Instruments([engine], rank)

    def train(seed: int) -> None:
        for _ in range(engine.gradient_accumulation_steps()):
            records = torch.randn(RECORDS, WIDTH, dtype=dtype, generator=torch.Generator().manual_seed(seed))
            engine.backward(engine(records).pow(2).mean())
            engine.step()

    with instruments:
        instruments.switch(True)
        instruments.first_batch(lambda: train(0))()
        instruments.end_first_batch(1, 0.0)
        found = instruments.sample(1).wait()
    return {
        "bytes": {
            name: value for name, value in found.memory_bytes.items() if not name.startswith("process")
        },
        "found_by": found.memory_found_by,
        "optimizer": type(engine.optimizer).__name__,
    }


def main(fork_ranks: Any, argument: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, options in argument["cases"].items():
        scratch = pathlib.Path(argument["scratch"]) / name.replace(" ", "_")
        yield name, fork_ranks(2, functools.partial(measured, options), scratch)
