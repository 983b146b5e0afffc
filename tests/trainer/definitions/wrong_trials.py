"""Trials whose user code goes wrong at a report or a validation, on all ranks or on one."""

import torch
from small_trials import DataParallelTrial, PipelineTrial

from dstrial import PyTorchCallback


class WrongMetric(DataParallelTrial):
    def evaluate_batch(self, dataloader_iter, batch_idx):
        return {"other": super().evaluate_batch(dataloader_iter, batch_idx)["validation_loss"]}


class WrongMetricOfPipeline(PipelineTrial):
    def evaluate_batch(self, dataloader_iter, batch_idx):
        return {"other": super().evaluate_batch(dataloader_iter, batch_idx)["validation_loss"]}


class EvaluationFails(DataParallelTrial):
    """Fails in the second call of every validation, on the ranks that ``fails_on`` names."""

    def evaluate_batch(self, dataloader_iter, batch_idx):
        if batch_idx == 1 and self.context.distributed.get_rank() in self.hparams["fails_on"]:
            raise KeyError("no such label")
        return super().evaluate_batch(dataloader_iter, batch_idx)


class Raising(PyTorchCallback):
    def __init__(self, context, method):
        self.context = context
        setattr(self, method, self.fail)

    def fail(self, *_args, **_kwargs):
        if self.context.distributed.get_rank() in self.context.get_hparams()["fails_on"]:
            raise LookupError("the callback has had enough")


class CallbackFails(DataParallelTrial):
    def build_callbacks(self):
        return {"raising": Raising(self.context, self.hparams["method"])}


class Noting(DataParallelTrial):
    """Writes down what random states and records it meets, so that two runs can be compared."""

    def __init__(self, context):
        super().__init__(context)
        self.num_evaluated = 0
        self.seen = []

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        metrics = super().train_batch(dataloader_iter, epoch_idx, batch_idx)
        metrics["evaluated"] = self.num_evaluated + len(self.seen)
        metrics["drawn"] = torch.rand(())
        return metrics

    def evaluate_batch(self, dataloader_iter, batch_idx):
        self.num_evaluated += 1
        self.seen.append(batch_idx)
        torch.rand(3)
        return super().evaluate_batch(dataloader_iter, batch_idx)
