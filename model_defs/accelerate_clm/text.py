"""Text for a language model: the source of Python's standard library, in blocks of tokens."""

import sysconfig
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers


def read_source(num_chars_max: int) -> str:
    """Return the first ``num_chars_max`` characters of the standard library's top-level modules, sorted by name."""
    folder = Path(sysconfig.get_path("stdlib"))
    # The modules called _sysconfigdata… were written on the machine that built this Python.
    paths = [path for path in sorted(folder.glob("*.py")) if not path.name.startswith("_sysconfigdata")]
    if not paths:
        raise FileNotFoundError(
            f"{folder} holds no Python source; expected the standard library's modules as .py files. "
            "Run this example with a Python whose standard library is installed as source."
        )
    return "".join(path.read_text(encoding="utf-8") for path in paths)[:num_chars_max]


def token_blocks(text: str, vocab_size: int, block_size: int) -> torch.Tensor:
    """Train a byte-level BPE tokenizer on the text; return the text's tokens.

    The result has shape (number of blocks, block_size) and type int64. The same text gives the same tokens on every rank.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False, special_tokens=[]
    )
    lines = text.splitlines(keepends=True)
    tokenizer.train_from_iterator(lines, trainer)
    codes = [code for encoding in tokenizer.encode_batch(lines) for code in encoding.ids]
    return torch.tensor(codes[: len(codes) // block_size * block_size]).view(-1, block_size)
