"""Trials that stall at the batch ``stall_at`` in different ways."""

import os
import pathlib
import signal
import time

import torch
import torch.distributed as dist
from small_records import Records
from small_trials import DataParallelTrial

from dstrial import DataLoader, PyTorchCallback
from dstrial.checkpoint.manifest import rank_state_name

FOREVER_S = 600


class StoppedTrial(DataParallelTrial):
    """Rank ``stall_rank`` writes its process id to a file and stops itself, once."""

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        pid_file = pathlib.Path(self.hparams["pid_file"])
        if (
            batch_idx == self.hparams["stall_at"]
            and self.context.distributed.get_rank() == self.hparams.get("stall_rank", 1)
            and not pid_file.exists()
        ):
            pid_file.write_text(f"{os.getpid()}\n")
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().train_batch(dataloader_iter, epoch_idx, batch_idx)


class SkippingTrial(DataParallelTrial):
    """Rank 1 skips a barrier of a process group that the trial has created."""

    def __init__(self, context):
        super().__init__(context)
        self.group = dist.new_group([0, 1], backend="gloo")

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        if batch_idx == self.hparams["stall_at"] and self.context.distributed.get_rank() == 0:
            dist.barrier(group=self.group)
        return super().train_batch(dataloader_iter, epoch_idx, batch_idx)


class SilentRecords(Records):
    """Records of which rank 1 hangs while it reads one."""

    def __init__(self, count, seed, silent_after, rank):
        super().__init__(count, seed)
        self.left = silent_after if rank == 1 else -1

    def __getitem__(self, record_idx):
        self.left -= 1
        if self.left == 0:
            self.read_from_storage()
        return super().__getitem__(record_idx)

    def read_from_storage(self):
        time.sleep(FOREVER_S)


class SilentLoaderTrial(DataParallelTrial):
    """The data set hangs on rank 1, in the rank itself or in a loader worker."""

    def build_training_data_loader(self):
        per_batch = 8  # of a rank: two micro batches of four
        records = SilentRecords(
            64, 1, per_batch * self.hparams["stall_at"] + 1, self.context.distributed.get_rank()
        )
        workers = self.hparams.get("num_workers", 0)
        return DataLoader(
            records, batch_size=4, num_workers=workers, multiprocessing_context="fork" if workers else None
        )


class SlowFirstBatchTrial(DataParallelTrial):
    """Only the first batch is slow, as if an operator were compiled."""

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        if batch_idx == 0:
            time.sleep(self.hparams["first_batch_s"] / 2)  # two micro batches
        return super().train_batch(dataloader_iter, epoch_idx, batch_idx)


class SilentStorage(PyTorchCallback):
    """Makes rank 1's file of the checkpoint at batch 10 a FIFO without a reader."""

    def __init__(self, context):
        self.rank = context.distributed.get_rank()

    def on_checkpoint_save_start(self, checkpoint):
        if checkpoint["progress"]["batches_trained"] == 10 and self.rank == 1:
            checkpoints = pathlib.Path(os.environ["DSTRIAL_RUN_DIR"]) / "checkpoints"
            (saving,) = checkpoints.glob("*.saving")
            os.mkfifo(saving.with_suffix("") / rank_state_name(1))


class SilentStorageTrial(DataParallelTrial):
    """The storage hangs while rank 1 writes the checkpoint at batch 10."""

    def build_callbacks(self):
        return {"silent": SilentStorage(self.context)}


class UnevenValidationTrial(DataParallelTrial):
    """Only rank 0 runs an extra forward in validation: in ZeRO 3 it is a collective."""

    def evaluate_batch(self, dataloader_iter, batch_idx):
        metrics = super().evaluate_batch(dataloader_iter, batch_idx)
        if self.context.distributed.get_rank() == 0 and not batch_idx:
            self.model_engine(torch.zeros(4, 8))
        return metrics
