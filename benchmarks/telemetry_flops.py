"""FLOPs of a batch by the run's instruments, by 6 times parameters times tokens, and by DeepSpeed's flops profiler.

    python benchmarks/telemetry_flops.py

Three models: matrices alone, GPT-2's architecture by transformers (its attention is a product of matrices of its own), and the
same with activation checkpointing. DeepSpeed's profiler counts forward; twice as much again is backward.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
from deepspeed.profiling.flops_profiler import FlopsProfiler
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from dstrial.engine.model_flops import FlopCounter

_RECORDS, _TOKENS, _WIDTH = 4, 128, 256


def matrices() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Return a chain of square layers, as far as 6 N is right by definition but for the first gradient."""
    model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(8)))
    return model, {"input": torch.randn(_RECORDS * _TOKENS, _WIDTH, requires_grad=True)}


def language_model(*, is_checkpointed: bool) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Return a small GPT-2 and a batch of it."""
    config = GPT2Config(
        vocab_size=2000, n_positions=_TOKENS, n_embd=_WIDTH, n_layer=4, n_head=4, use_cache=False
    )
    model = GPT2LMHeadModel(config)
    if is_checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    ids = torch.randint(0, 2000, (_RECORDS, _TOKENS))
    return model, {"input_ids": ids, "labels": ids}


def loss_of(output: Any) -> torch.Tensor:
    """Return something to go backward from."""
    loss: torch.Tensor = output.sum() if isinstance(output, torch.Tensor) else output.loss
    return loss


MODELS: dict[str, Callable[[], tuple[nn.Module, dict[str, torch.Tensor]]]] = {
    "8 matrices": matrices,
    "GPT-2, 4 layers": lambda: language_model(is_checkpointed=False),
    "the same, checkpointed": lambda: language_model(is_checkpointed=True),
}


def main() -> None:
    """Count, and print the table."""
    print(
        "model                     parameters   counted GFLOP  recomputed   6 N tokens   ratio   DeepSpeed x 3   ratio"
    )
    for name, make in MODELS.items():
        torch.manual_seed(0)
        model, batch = make()
        num_params = sum(param.numel() for param in model.parameters())
        with FlopCounter() as counter:
            loss_of(model(**batch)).backward()
        count = counter.count
        assert count.unknown is None, count.unknown
        rule = 6.0 * num_params * _RECORDS * _TOKENS
        profiler = FlopsProfiler(model)
        profiler.start_profile()
        model(**batch)
        profiled = 3.0 * profiler.get_total_flops()
        profiler.end_profile()
        print(
            f"{name:<24}  {num_params:>10,}  {count.model / 1e9:>14.3f}  {count.recomputed / 1e9:>10.3f}  {rule / 1e9:>11.3f}  "
            f"{count.model / rule:>6.3f}  {profiled / 1e9:>14.3f}  {count.model / profiled:>6.3f}"
        )


if __name__ == "__main__":
    main()
