"""Text for a language model: the source of Python's standard library, in blocks of character codes."""

import sysconfig
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

VOCABULARY_SIZE = 128  # ASCII; every other character is read as "?"


def read_modules(num_chars_max: int) -> bytes:
    """Return the standard library's top-level modules, sorted by name, as one ASCII text."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        if path.name.startswith("_sysconfigdata"):  # written on the machine that built this Python
            continue
        text += path.read_text(encoding="utf-8").encode("ascii", errors="replace")
        if len(text) >= num_chars_max:
            break
    if not text:
        raise FileNotFoundError(
            f"{folder} holds no Python source; expected the standard library's modules as .py files. "
            "Run this example with a Python whose standard library is installed as source."
        )
    return bytes(text[:num_chars_max])


def load_blocks(
    num_chars_max: int, block_size: int, num_validation_blocks: int
) -> tuple[TensorDataset, TensorDataset]:
    """Return (training, validation) sets of (characters, following characters), both int64 (block_size,).

    The blocks do not overlap. Validation blocks are spread evenly over the text, so that they come from
    all modules; the same Python release gives the same blocks on every machine.
    """
    codes = torch.frombuffer(bytearray(read_modules(num_chars_max)), dtype=torch.uint8).long()
    num_blocks = (len(codes) - 1) // block_size
    if num_blocks <= num_validation_blocks:
        raise ValueError(
            f"num_chars_max is {num_chars_max}; expected more than "
            f"{(num_validation_blocks + 1) * block_size} for {num_validation_blocks} validation blocks of "
            f"{block_size}. Raise it, or lower the others."
        )
    inputs = codes[: num_blocks * block_size].view(num_blocks, block_size)
    targets = codes[1 : num_blocks * block_size + 1].view(num_blocks, block_size)
    is_validation = torch.zeros(num_blocks, dtype=torch.bool)
    is_validation[torch.arange(num_validation_blocks) * num_blocks // num_validation_blocks] = True
    training = TensorDataset(inputs[~is_validation], targets[~is_validation])
    return training, TensorDataset(inputs[is_validation], targets[is_validation])
