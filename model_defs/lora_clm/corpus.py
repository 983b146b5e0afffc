"""Text for a language model: the source of Python's standard library, in blocks of character codes."""

import sysconfig
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

VOCABULARY_SIZE = 128  # ASCII; every other character is read as "?"


def load_blocks(
    num_chars_max: int, block_size: int, num_validation_blocks: int
) -> tuple[TensorDataset, TensorDataset]:
    """Return the training and validation sets of blocks: character codes, int64 (block_size,).

    Validation blocks are spread evenly over the text. The same Python release gives the same blocks on every machine.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(folder.glob("[a-z]*.py")):
        text += path.read_text(encoding="utf-8").encode("ascii", errors="replace")
        if len(text) >= num_chars_max:
            break
    num_blocks = min(len(text), num_chars_max) // block_size
    if num_blocks <= num_validation_blocks:
        raise ValueError(
            f"{folder} gives {num_blocks} blocks of {block_size} characters; expected more than the {num_validation_blocks} "
            "for validation. Raise num_chars_max, or use a Python whose standard library is installed as source."
        )
    blocks = torch.frombuffer(text, dtype=torch.uint8)[: num_blocks * block_size].long().view(-1, block_size)
    is_validation = torch.zeros(num_blocks, dtype=torch.bool)
    is_validation[torch.arange(num_validation_blocks) * num_blocks // num_validation_blocks] = True
    return TensorDataset(blocks[~is_validation]), TensorDataset(blocks[is_validation])
