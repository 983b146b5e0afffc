"""The data: the source text of Python's own standard library, byte by byte."""

import sysconfig
from pathlib import Path

import torch
from torch.utils.data import Dataset

WORDS = 256
"""Tokens that there are: one per byte."""

NUM_VALIDATION_BLOCKS = 64
"""Blocks that are not trained on."""


class Blocks(Dataset):
    """Blocks of bytes; a record is what GPT-2 takes, its labels the bytes themselves."""

    def __init__(self, blocks: torch.Tensor) -> None:
        self.blocks = blocks

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, idx: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.blocks[idx], "labels": self.blocks[idx]}


def load_splits(block_size: int, num_bytes_max: int = 200_000) -> tuple[Blocks, Blocks]:
    """Return (training, validation) sets: the first modules of the standard library, in order of their names, as blocks."""
    text = b""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py")):
        text += path.read_bytes()
        if len(text) >= num_bytes_max:
            break
    codes = torch.tensor(list(text[:num_bytes_max]), dtype=torch.long)
    blocks = codes[: len(codes) // block_size * block_size].view(-1, block_size)
    return Blocks(blocks[NUM_VALIDATION_BLOCKS:]), Blocks(blocks[:NUM_VALIDATION_BLOCKS])
