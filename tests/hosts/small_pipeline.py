"""The model of ``small_trial`` as a pipeline of two stages."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.pipe import PipelineModule
from small_trial import SmallTrial, layers, loss_of


class SmallPipeline(SmallTrial):
    """Trains on the same records as ``SmallTrial``."""

    def make_model(self) -> torch.nn.Module:
        """Return the model as a two-stage pipeline."""
        return PipelineModule(layers(), num_stages=2, loss_fn=loss_of)

    def step(self, iterator: Any) -> torch.Tensor:
        """Train one batch and return its loss."""
        loss: torch.Tensor = self.engine.train_batch(iterator)
        return loss

    def evaluate_batch(self, iterator: Any, batch_idx: int) -> dict[str, float]:
        """Return metric ``zero``, which is always 0."""
        self.engine.eval_batch(iterator)
        return {"zero": 0.0}
