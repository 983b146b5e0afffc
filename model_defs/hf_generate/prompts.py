"""Prompts of unequal length from the source of Python's standard library, and a tokenizer for them."""

import itertools
import pathlib
import random
import sysconfig

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END = "<|end|>"
NUM_CHARS_MAX = 300_000  # maximum number of characters on which the tokenizer is trained


def read_prompts(num_prompts: int, num_chars_max: int, seed: int) -> list[str]:
    """Return the beginnings of functions, cut at random lengths; equal seeds give equal prompts."""
    draw = random.Random(seed)
    lines = itertools.chain.from_iterable(text.splitlines(keepends=True) for text in _modules())
    prompts = []
    for line in lines:
        if line.startswith("def "):
            body = line + "".join(itertools.islice(lines, 8))
            prompts.append(body[: draw.randint(len("def "), num_chars_max)])
            if len(prompts) == num_prompts:
                break
    return prompts


def train_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer on the standard library's source."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_modules(NUM_CHARS_MAX), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)


def _modules(num_chars_max: int | None = None):
    num_chars = 0
    for path in sorted(pathlib.Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        num_chars += len(text)
        if num_chars_max is not None and num_chars > num_chars_max:
            return
        yield text
