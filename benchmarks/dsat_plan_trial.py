"""The trial of ``dsat_plan.py``: a decoder-only transformer of any size on random tokens."""

from __future__ import annotations

from typing import Any

import deepspeed
import gpt_model
import torch

from dstrial import DataLoader, DeepSpeedTrial, DeepSpeedTrialContext


class Tokens(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Records of random tokens, with themselves as labels."""

    def __init__(self, shape: dict[str, Any]) -> None:
        self.shape = shape

    def __len__(self) -> int:
        return 1024

    def __getitem__(self, idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(idx)
        tokens = torch.randint(
            self.shape["vocabulary"], (self.shape["sequence_length"],), generator=generator
        )
        return tokens, tokens


class GPTTrial(DeepSpeedTrial):
    """Trains the transformer; reports ``loss``."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        self.context = context
        hparams = context.get_hparams()
        self.shape = hparams["shape"]
        model = gpt_model.model(**self.shape)
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=hparams["deepspeed_config"]
        )
        self.engine = context.wrap_model_engine(engine)

    def build_training_data_loader(self) -> DataLoader:
        """All records."""
        return DataLoader(
            Tokens(self.shape), batch_size=self.context.get_train_micro_batch_size_per_gpu(), shuffle=True
        )

    def build_validation_data_loader(self) -> DataLoader:
        """The same."""
        return DataLoader(Tokens(self.shape), batch_size=self.context.get_train_micro_batch_size_per_gpu())

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:  # noqa: ARG002
        """Train one micro batch."""
        tokens, labels = (part.to(self.engine.device) for part in next(dataloader_iter))
        loss = self.engine(tokens, labels)
        self.engine.backward(loss)
        self.engine.step()
        return {"loss": loss}

    def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:  # noqa: ARG002
        """Evaluate one micro batch."""
        tokens, labels = (part.to(self.engine.device) for part in next(dataloader_iter))
        return {"loss": self.engine(tokens, labels)}
