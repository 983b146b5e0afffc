"""Where a batch's memory goes by a run's instruments, and by torch's memory profiler.

    python benchmarks/telemetry_memory.py [--json FILE]

Two models in DeepSpeed's engine on the CPU, the convolutional net of ``model_defs/digits`` and the GPT of
``model_defs/stdlib_lm`` in one piece. The instruments measure the first batch, as in every run; the profiler watches the second.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import pathlib
import sys
import warnings
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.profiler._memory_profiler import _CATEGORY_TO_INDEX, Category, MemoryProfileTimeline

from dstrial.ranks.sockets import free_port
from dstrial.telemetry.instruments import Instruments
from dstrial.telemetry.summary import PARTS, parts_of

TREE = pathlib.Path(__file__).resolve().parent.parent
_RECORDS, _BLOCK, _WIDTH, _VOCABULARY = 32, 64, 64, 128
_PARTS_OF_TORCH = {
    "parameters": (Category.PARAMETER,),
    "gradients": (Category.GRADIENT,),
    "optimizer": (Category.OPTIMIZER_STATE,),
    "activations": (Category.ACTIVATION, Category.INPUT),
}


class LanguageModel(nn.Module):
    """The layers of ``model_defs/stdlib_lm``, called one after the other; returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        from gpt import Block, Embedding, Position

        self.embedding = Embedding(_VOCABULARY, _WIDTH)
        self.position = Position(_BLOCK, _WIDTH)
        self.blocks = nn.Sequential(*(Block(_WIDTH, 4) for _ in range(4)))
        self.norm = nn.LayerNorm(_WIDTH)

    def forward(self, characters: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean loss."""
        from gpt import next_character_loss, unembed

        activations = self.norm(self.blocks(self.position(self.embedding(characters))))
        return next_character_loss(unembed(self.embedding, activations), targets)


class Digits(nn.Module):
    """The net of ``model_defs/digits``, without dropout; returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        from model_def import DigitsNet

        self.net = DigitsNet(16, 0.0)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean loss."""
        return nn.functional.cross_entropy(self.net(images), labels)


def digits_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Return images and labels."""
    return torch.rand(_RECORDS, 1, 8, 8), torch.randint(0, 10, (_RECORDS,))


def text_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Return characters, and those that follow."""
    characters = torch.randint(0, _VOCABULARY, (_RECORDS, _BLOCK))
    return characters, characters.clone()


MODELS = {
    "digits, convolutions": (Digits, digits_batch),
    "stdlib_lm, in one piece": (LanguageModel, text_batch),
}


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--json", type=pathlib.Path, help="also write all figures to this file")
    options = parser.parse_args()
    sys.path[:0] = [str(TREE / "model_defs" / name) for name in ("digits", "stdlib_lm")]
    warnings.filterwarnings("ignore")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = str(free_port())
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    found = {name: measured(make, batch) for name, (make, batch) in MODELS.items()}
    torch.distributed.destroy_process_group()
    print("| model | part | instruments, KiB | torch's profiler, KiB | ratio |\n|---|---|---|---|---|")
    for name, (ours, torchs) in found.items():
        for part in PARTS:
            if part in ours and torchs.get(part):
                ratio = ours[part] / torchs[part]
                print(
                    f"| {name} | {part} | {ours[part] / 1024:,.1f} | {torchs[part] / 1024:,.1f} | {ratio:.3f} |"
                )
            elif part in ours:
                print(f"| {name} | {part} | {ours[part] / 1024:,.1f} | no category | |")
    if options.json:
        options.json.write_text(json.dumps(found, indent=2))


def measured(make: type[nn.Module], batch: Any) -> tuple[dict[str, float], dict[str, float]]:
    """Return bytes by part, by the instruments and by torch's profiler."""
    torch.manual_seed(0)
    model = make()
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": _RECORDS,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
            "steps_per_print": 1_000_000,
        },
    )

    def train_batch(_iterator: object = None, _epoch: int = 0, _batch: int = 0) -> None:
        engine.backward(engine(*batch()))
        engine.step()

    with Instruments([engine], 0) as instruments:
        instruments.begin(0)
        instruments.switch(True)
        instruments.first_batch(train_batch)(None, 0, 0)
        instruments.end_first_batch(1, 0.0)
        told = instruments.sample(1).wait().memory_bytes
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=True, with_stack=True
    ) as watched:
        train_batch()
    return parts_of(told), by_torch(watched)


def by_torch(watched: profile) -> dict[str, float]:
    """Return bytes by part, each at its largest, and the largest sum of all."""
    _, sizes = MemoryProfileTimeline(watched._memory_profile())._coalesce_timeline("cpu")
    found = {
        part: float(max(sum(row[_CATEGORY_TO_INDEX[one] + 1] for one in categories) for row in sizes))
        for part, categories in _PARTS_OF_TORCH.items()
    }
    return {**found, "peak": float(max(sum(row) for row in sizes))}


if __name__ == "__main__":
    main()
