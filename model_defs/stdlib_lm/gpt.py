"""A small GPT as a list of layers, which a DeepSpeed pipeline divides into stages."""

import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn


class Embedding(nn.Module):
    """Maps characters (batch, block) to activations (batch, block, width)."""

    def __init__(self, vocabulary_size: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(width**-0.5 * torch.randn(vocabulary_size, width))

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(characters, self.weight)


class Position(nn.Module):
    """Adds a learned vector to the activations at each position of the block."""

    def __init__(self, block_size: int, width: int) -> None:
        super().__init__()
        self.vectors = nn.Parameter(width**-0.5 * torch.randn(block_size, width))

    def forward(self, activations: torch.Tensor) -> torch.Tensor:
        return activations + self.vectors


def unembed(embedding: Embedding, activations: torch.Tensor) -> torch.Tensor:
    """Map activations (batch, block, width) to logits (batch, block, vocabulary) with the embedding's weight."""
    return nn.functional.linear(activations, embedding.weight)


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each with a layer norm and a skip connection."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, activations: torch.Tensor) -> torch.Tensor:
        batch, block, width = activations.shape
        heads = self.query_key_value(self.attention_norm(activations))
        query, key, value = heads.view(batch, block, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        attended = attended.transpose(1, 2).reshape(batch, block, width)
        activations = activations + self.attention_out(attended)
        return activations + self.feed_forward(activations)


def build_layers(
    vocabulary_size: int, block_size: int, width: int, num_layers: int, num_heads: int
) -> list[LayerSpec]:
    """Return the layers in order; the first and the last share one weight, also on different stages."""
    return [
        TiedLayerSpec("embedding", Embedding, vocabulary_size, width),
        LayerSpec(Position, block_size, width),
        *(LayerSpec(Block, width, num_heads) for _ in range(num_layers)),
        LayerSpec(nn.LayerNorm, width),
        TiedLayerSpec("embedding", Embedding, vocabulary_size, width, forward_fn=unembed),
    ]


def next_character_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy in nats per character, shape ()."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
