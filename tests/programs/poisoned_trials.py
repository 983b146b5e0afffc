"""Trials whose loss or gradients become NaN at a configured batch."""

import torch
from small_trials import DataParallelTrial


class NotANumber(torch.autograd.Function):
    """Passes a tensor through; its gradient is NaN while ``is_on``."""

    is_on = False

    @staticmethod
    def forward(_ctx, value):
        return value.clone()

    @staticmethod
    def backward(_ctx, gradient):
        return gradient * float("nan") if NotANumber.is_on else gradient


class Poisoned(DataParallelTrial):
    """Loss and gradients are NaN from batch ``nan_from`` until before ``nan_until``."""

    def is_poisoned(self, batch_idx):
        return self.hparams.get("nan_from", 0) <= batch_idx < self.hparams.get("nan_until", 10**9)

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        features, targets = self.context.to_device(next(dataloader_iter))
        dtype = next(self.model_engine.parameters()).dtype
        outputs = self.model_engine(features.to(dtype))
        loss = torch.nn.functional.mse_loss(outputs, targets.to(dtype))
        if self.is_poisoned(batch_idx):
            loss = loss * float("nan")
        self.model_engine.backward(loss)
        self.model_engine.step()
        return {"loss": loss, "batch_idx": batch_idx}

    def evaluate_batch(self, dataloader_iter, batch_idx):
        features, targets = self.context.to_device(next(dataloader_iter))
        outputs = self.model_engine(features.to(next(self.model_engine.parameters()).dtype))
        return {"validation_loss": torch.nn.functional.mse_loss(outputs.float(), targets)}


class OnlyReported(Poisoned):
    """Reports NaN and trains on: its weights stay finite."""

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        metrics = DataParallelTrial.train_batch(self, dataloader_iter, epoch_idx, batch_idx)
        if self.is_poisoned(batch_idx):
            metrics["loss"] = metrics["loss"].detach() * float("nan")
        return metrics


class OnlyReportedOnRank1(OnlyReported):
    def is_poisoned(self, batch_idx):
        return self.context.distributed.get_rank() == 1


class Skipping(Poisoned):
    """NaN gradients with a finite loss: engines that check gradients skip the step."""

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        features, targets = self.context.to_device(next(dataloader_iter))
        dtype = next(self.model_engine.parameters()).dtype
        NotANumber.is_on = self.is_poisoned(batch_idx)
        outputs = NotANumber.apply(self.model_engine(features.to(dtype)))
        loss = torch.nn.functional.mse_loss(outputs, targets.to(dtype))
        self.model_engine.backward(loss)
        self.model_engine.step()
        return {"loss": loss}
