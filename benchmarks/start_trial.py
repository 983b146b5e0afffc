"""What ``start.py`` starts through dstrial: the same training as ``start_bare.py`` as a trial."""

from __future__ import annotations

from typing import Any

import deepspeed
import start_marks
import start_model
import torch

from dstrial import DataLoader, DeepSpeedTrial, DeepSpeedTrialContext


class StartTrial(DeepSpeedTrial):
    """Trains on digits; each rank notes when its first batch begins."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        model = start_model.digits_net()
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=context.get_hparams()["deepspeed_config"]
        )
        self.engine = context.wrap_model_engine(engine)
        self.records = start_model.digits()

    def build_training_data_loader(self) -> DataLoader:
        return DataLoader(self.records, batch_size=start_model.MICRO_BATCH_SIZE, shuffle=True)

    def build_validation_data_loader(self) -> DataLoader:
        return DataLoader(torch.utils.data.Subset(self.records, range(64)), batch_size=32)

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> Any:  # noqa: ARG002
        images, labels = next(dataloader_iter)
        start_marks.note_first_batch()
        loss = torch.nn.functional.cross_entropy(self.engine(images), labels)
        self.engine.backward(loss)
        self.engine.step()
        return {"loss": loss}

    def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:  # noqa: ARG002
        images, labels = next(dataloader_iter)
        return {"validation_loss": torch.nn.functional.cross_entropy(self.engine(images), labels)}
