"""Real data without a download: the source of Python's own standard library as blocks of character codes."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

VOCABULARY_SIZE = 128
"""ASCII; every other character is read as ``?``."""


def read_text(num_chars: int) -> bytes:
    """Return the first characters of the standard library's top-level modules, in the order of their names.

    Raises:
        FileNotFoundError: the library is not installed as source.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        if path.name.startswith("_sysconfigdata"):  # differs from build to build
            continue
        text += path.read_text(encoding="utf-8").encode("ascii", errors="replace")
        if len(text) >= num_chars:
            return bytes(text[:num_chars])
    raise FileNotFoundError(
        f"{folder} holds {len(text)} characters of Python source; expected {num_chars}. "
        "Use a Python whose standard library is installed as source."
    )


def blocks(num_blocks: int, block_size: int) -> TensorDataset:
    """Return (characters, following characters), int64 (block_size,) each."""
    codes = torch.frombuffer(bytearray(read_text(num_blocks * block_size + 1)), dtype=torch.uint8).long()
    return TensorDataset(codes[:-1].view(num_blocks, block_size), codes[1:].view(num_blocks, block_size))
