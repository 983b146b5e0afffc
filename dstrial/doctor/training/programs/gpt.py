"""A GPT of any size in plain torch, whose forward returns the loss; and its text."""

from __future__ import annotations

import dataclasses
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """How large a model is.

    Attributes:
        width: of the activations.
        num_layers: transformer blocks.
        num_heads: of each attention.
        block_size: characters of a record.
        dropout: probability.
        fused: whether attention is torch's fused operation; otherwise it is written out, whose backward pass adds up in
            the same order each time.
    """

    width: int = 64
    num_layers: int = 2
    num_heads: int = 4
    block_size: int = 32
    dropout: float = 0.0
    fused: bool = False


class Block(nn.Module):
    """Causal self-attention and feed-forward, each with layer norm and a residual."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.attention_norm = nn.LayerNorm(shape.width)
        self.query_key_value = nn.Linear(shape.width, 3 * shape.width)
        self.attention_out = nn.Linear(shape.width, shape.width)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(shape.width),
            nn.Linear(shape.width, 4 * shape.width),
            nn.GELU(),
            nn.Linear(4 * shape.width, shape.width),
            nn.Dropout(shape.dropout),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return activations of the same shape, (records, characters, width)."""
        records, characters, width = x.shape
        parts = self.query_key_value(self.attention_norm(x))
        query, key, value = parts.view(records, characters, 3, self.shape.num_heads, -1).permute(
            2, 0, 3, 1, 4
        )
        if self.shape.fused:
            attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5)
            later = torch.ones(characters, characters, dtype=torch.bool, device=x.device).triu(1)
            attended = scores.masked_fill(later, float("-inf")).softmax(dim=-1) @ value
        x = x + self.attention_out(attended.transpose(1, 2).reshape(records, characters, width))
        fed: torch.Tensor = self.feed_forward(x)
        return x + fed


class GPT(nn.Module):
    """Maps characters and the characters that follow to their mean loss.

    Both are int64 (records, block_size); the loss has shape () and is float32.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY_SIZE, shape.width)
        self.position = nn.Parameter(shape.width**-0.5 * torch.randn(shape.block_size, shape.width))
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY_SIZE)

    def forward(self, characters: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        """Return the loss in nats per character."""
        x = self.embedding(characters) + self.position
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        return functional.cross_entropy(logits.flatten(0, 1), following.flatten())


def model(**shape: Any) -> GPT:
    """Return a model; arguments are those of ``Shape``."""
    return GPT(Shape(**shape))


def batch(micro_batch_size: int, **shape: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the model's forward pass takes."""
    size = (micro_batch_size, Shape(**shape).block_size)
    return torch.zeros(size, dtype=torch.long), torch.zeros(size, dtype=torch.long)


VOCABULARY_SIZE = 128
"""ASCII; every other character is read as ``?``."""


def read_text(num_chars: int) -> bytes:
    """Return the first characters of the top-level standard library, sorted by name.

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
