"""Trials whose user code fails at a report or a validation, on some or all ranks."""

from small_trials import DataParallelTrial

from dstrial import PyTorchCallback


class WrongMetric(DataParallelTrial):
    def evaluate_batch(self, dataloader_iter, batch_idx):
        return {"other": super().evaluate_batch(dataloader_iter, batch_idx)["validation_loss"]}


class EvaluationFails(DataParallelTrial):
    """Fails in the second call of every validation on the ranks in ``fails_on``."""

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
