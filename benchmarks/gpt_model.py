"""A decoder-only transformer of any size, with its batches."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    num_layers: int = 4
    width: int = 256
    vocabulary: int = 4096
    sequence_length: int = 128
    checkpoints: bool = False  # recompute each block in the backward pass


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.num_heads = width // (128 if width >= 2048 else min(64, width))
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        records, tokens, width = x.shape
        parts = self.qkv(self.norm1(x)).view(records, tokens, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.project(attended.transpose(1, 2).reshape(records, tokens, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.sequence_length, shape.width)
        self.blocks = nn.ModuleList(Block(shape.width) for _ in range(shape.num_layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(places)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.shape.checkpoints else block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def model(**shape: Any) -> GPT:
    return GPT(Shape(**shape))


def scored_model(**shape: Any) -> GPT:
    """Return a model whose attention keeps its scores, as without a fused kernel."""
    made = model(**shape)
    for block in made.blocks:
        block.forward = _scored_forward.__get__(block, Block)
    return made


def _scored_forward(block: Block, x: torch.Tensor) -> torch.Tensor:
    records, tokens, width = x.shape
    query, key, value = (
        block.qkv(block.norm1(x)).view(records, tokens, 3, block.num_heads, -1).permute(2, 0, 3, 1, 4)
    )
    scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
    attended = functional.dropout(scores.softmax(-1), 0.1) @ value
    x = x + block.project(attended.transpose(1, 2).reshape(records, tokens, width))
    return x + block.down(functional.gelu(block.up(block.norm2(x))))


def batch(micro_batch_size: int, **shape: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and labels, (records, tokens) int64 each."""
    of = Shape(**shape)
    tokens = torch.randint(0, of.vocabulary, (micro_batch_size, of.sequence_length))
    return tokens, tokens.clone()
