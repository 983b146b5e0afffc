"""The trial of ``dstrial doctor --train``: a small GPT on Python's source text."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import dstrial

VOCABULARY_SIZE = 128  # ASCII; other characters become ``?``


class Block(nn.Module):
    """Causal self-attention and feed-forward, each with layer norm and a residual."""

    def __init__(self, width: int, num_heads: int, dropout: float, *, is_fused: bool) -> None:
        super().__init__()
        self.num_heads, self.is_fused = num_heads, is_fused
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
            nn.Dropout(dropout),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        records, characters, width = x.shape
        parts = self.query_key_value(self.attention_norm(x)).view(records, characters, 3, self.num_heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        if self.is_fused:
            attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            # Not the fused attention kernel, whose backward pass may be nondeterministic.
            scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5)
            later = torch.ones(characters, characters, dtype=torch.bool, device=x.device).triu(1)
            attended = scores.masked_fill(later, float("-inf")).softmax(dim=-1) @ value
        x = x + self.attention_out(attended.transpose(1, 2).reshape(records, characters, width))
        fed: torch.Tensor = self.feed_forward(x)
        return x + fed


class GPT(nn.Module):
    """A GPT whose forward pass returns the mean loss.

    Its inputs are characters and next characters, two int64 tensors of shape (records, block_size).
    """

    def __init__(
        self,
        width: int = 64,
        num_layers: int = 2,
        num_heads: int = 4,
        block_size: int = 32,
        dropout: float = 0.0,
        is_fused: bool = False,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY_SIZE, width)
        self.position = nn.Parameter(width**-0.5 * torch.randn(block_size, width))
        self.blocks = nn.ModuleList(
            Block(width, num_heads, dropout, is_fused=is_fused) for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY_SIZE)

    def forward(self, characters: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        x = self.embedding(characters) + self.position
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        return functional.cross_entropy(logits.flatten(0, 1), following.flatten())


def text_blocks(num_blocks: int, block_size: int) -> TensorDataset:
    """Return a data set of ``num_blocks`` pairs (characters, next characters).

    Both parts of a pair are int64 tensors of shape (block_size,). The text is the source code of Python's standard library.

    Raises:
        FileNotFoundError: the library's source is missing or has too few characters.
    """
    folder, wanted, text = Path(sysconfig.get_path("stdlib")), num_blocks * block_size + 1, bytearray()
    for path in sorted(folder.glob("[a-z]*.py")):  # without _sysconfigdata*.py, which differs between builds
        text += path.read_text(encoding="utf-8").encode("ascii", errors="replace")
    if len(text) < wanted:
        raise FileNotFoundError(
            f"{folder} has {len(text)} characters of Python source; expected {wanted}. "
            "Use a Python whose standard library is installed as source."
        )
    codes = torch.frombuffer(text[:wanted], dtype=torch.uint8).long()
    return TensorDataset(codes[:-1].view(num_blocks, block_size), codes[1:].view(num_blocks, block_size))


class TextTrial(dstrial.DeepSpeedTrial):
    """Trains the GPT of hyperparameter ``shape`` on ``num_blocks`` blocks of text."""

    def __init__(self, context: dstrial.DeepSpeedTrialContext) -> None:
        self.context = context
        hparams = context.get_hparams()
        self.num_blocks = int(hparams.get("num_blocks") or 256)
        self.shape = dict(hparams.get("shape") or {})
        if hparams.get("is_deterministic"):
            torch.use_deterministic_algorithms(True, warn_only=True)
        torch.manual_seed(11)
        self.model = GPT(**self.shape)
        config = dstrial.overwrite_deepspeed_config(
            hparams["deepspeed_config"], hparams.get("overwrite_deepspeed_args") or {}
        )
        engine, *_ = deepspeed.initialize(
            model=self.model, model_parameters=self.model.parameters(), config=config
        )
        self.engine = context.wrap_model_engine(engine)

    def build_training_data_loader(self) -> dstrial.DataLoader:
        return self.loader(self.num_blocks, shuffle=True, drop_last=True)

    def build_validation_data_loader(self) -> dstrial.DataLoader:
        return self.loader(8)

    def loader(self, num_blocks: int, **options: Any) -> dstrial.DataLoader:
        blocks = text_blocks(num_blocks, int(self.shape.get("block_size") or 32))
        return dstrial.DataLoader(
            blocks, batch_size=self.context.get_train_micro_batch_size_per_gpu(), **options
        )

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        del epoch_idx, batch_idx
        characters, following = self.context.to_device(next(dataloader_iter))
        loss = self.engine(characters, following)
        self.engine.backward(loss)
        self.engine.step()
        return {"loss": loss}

    def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:
        del batch_idx
        characters, following = self.context.to_device(next(dataloader_iter))
        return {"validation_loss": self.engine(characters, following)}
