"""Trials whose ranks exit early with code 0 or do not exit after training."""

import atexit
import os
import sys
import threading
import time

from small_trials import DataParallelTrial


class LeavingTrial(DataParallelTrial):
    """Ranks ``leaving_ranks`` exit 0 at batch ``leave_at``; -1 means in ``__init__``."""

    def __init__(self, context):
        super().__init__(context)
        if self.hparams["leave_at"] == -1:
            self.leave()

    def leave(self):
        if self.context.distributed.get_rank() in self.hparams["leaving_ranks"]:
            sys.stdout.flush()
            {"sys.exit": sys.exit, "os._exit": os._exit}[self.hparams["how"]](0)

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        if batch_idx == self.hparams["leave_at"]:
            self.leave()
        return super().train_batch(dataloader_iter, epoch_idx, batch_idx)


def serve_for_ever():
    time.sleep(600)


class StayingTrial(DataParallelTrial):
    """After training, a thread keeps rank 1 alive and an exit handler rank 2."""

    def __init__(self, context):
        super().__init__(context)
        rank = context.distributed.get_rank()
        if rank == 1:
            threading.Thread(target=serve_for_ever, name="server").start()
            threading.Thread(target=time.sleep, args=(600,), name="daemon", daemon=True).start()
        if rank == 2:
            atexit.register(serve_for_ever)
