"""Small real trials whose ranks leave training with exit code 0, or do not end after it."""

import atexit
import os
import sys
import threading
import time

from small_trials import DataParallelTrial


class LeavingTrial(DataParallelTrial):
    """The ranks in ``leaving_ranks`` exit 0 in the batch after ``leave_at``, or in ``__init__`` where that is -1."""

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
    """Rank 1 does not end after training: a thread or an exit handler of its own holds it, or it stops itself."""

    def __init__(self, context):
        super().__init__(context)
        if context.distributed.get_rank() == 1:
            if self.hparams["how"] == "thread":
                threading.Thread(target=serve_for_ever, name="server").start()
                threading.Thread(target=time.sleep, args=(600,), name="daemon", daemon=True).start()
            else:
                atexit.register(serve_for_ever)
