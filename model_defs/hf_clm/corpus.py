"""Text for a language model: the source of Python's standard library, in blocks of tokens."""

import sysconfig
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END = "<|endoftext|>"


def read_modules(num_chars_max: int) -> list[str]:
    """Return the texts of the standard library's top-level modules, sorted by name, ``num_chars_max`` characters in total."""
    folder = Path(sysconfig.get_path("stdlib"))
    texts: list[str] = []
    num_chars = 0
    for path in sorted(folder.glob("*.py")):
        if path.name.startswith("_sysconfigdata"):  # written on the machine that built this Python
            continue
        texts.append(path.read_text(encoding="utf-8")[: num_chars_max - num_chars])
        num_chars += len(texts[-1])
        if num_chars >= num_chars_max:
            break
    if not texts:
        raise FileNotFoundError(
            f"{folder} holds no Python source; expected the standard library's modules as .py files. "
            "Run this example with a Python whose standard library is installed as source."
        )
    return texts


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer, as GPT-2's; the same texts give the same tokens on every rank."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, bos_token=END, pad_token=END)


class Blocks(torch.utils.data.Dataset):
    """Blocks of tokens as GPT-2's inputs; the labels are equal to the inputs."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, idx: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[idx], "labels": self.tokens[idx]}


def load_blocks(
    tokenizer: PreTrainedTokenizerFast, texts: list[str], block_size: int, num_eval_blocks: int
) -> tuple[Blocks, Blocks]:
    """Return the training and evaluation sets; evaluation blocks are spread evenly over the text."""
    codes: list[int] = []
    for text in texts:
        codes += [*tokenizer.backend_tokenizer.encode(text).ids, tokenizer.eos_token_id]
    num_blocks = len(codes) // block_size
    if num_blocks <= num_eval_blocks:
        raise ValueError(
            f"num_chars_max gives {num_blocks} blocks of {block_size} tokens; expected more than {num_eval_blocks}, the "
            "evaluation's. Raise it, or lower the others."
        )
    blocks = torch.tensor(codes[: num_blocks * block_size]).view(num_blocks, block_size)
    is_evaluation = torch.zeros(num_blocks, dtype=torch.bool)
    is_evaluation[torch.arange(num_eval_blocks) * num_blocks // num_eval_blocks] = True
    return Blocks(blocks[~is_evaluation]), Blocks(blocks[is_evaluation])
