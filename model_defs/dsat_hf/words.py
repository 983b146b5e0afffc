"""Data of the scripts ``plain.py`` and ``train.py``: the source of Python's standard library, as bytes."""

import sysconfig
from pathlib import Path

import torch
from torch.utils.data import Dataset

WORDS = 256
"""Size of the vocabulary: one token per value of a byte."""

NUM_VALIDATION_BLOCKS = 64
"""Number of blocks for validation."""


class Blocks(Dataset):
    """Blocks of bytes as GPT-2's inputs; the labels are equal to the inputs."""

    def __init__(self, blocks: torch.Tensor) -> None:
        self.blocks = blocks

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, idx: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.blocks[idx], "labels": self.blocks[idx]}


def load_splits(block_size: int, num_bytes_max: int = 200_000) -> tuple[Blocks, Blocks]:
    """Return the training and validation sets of blocks, from the standard library's first modules by name."""
    text = b""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py")):
        text += path.read_bytes()
        if len(text) >= num_bytes_max:
            break
    codes = torch.tensor(list(text[:num_bytes_max]), dtype=torch.long)
    blocks = codes[: len(codes) // block_size * block_size].view(-1, block_size)
    return Blocks(blocks[NUM_VALIDATION_BLOCKS:]), Blocks(blocks[:NUM_VALIDATION_BLOCKS])
