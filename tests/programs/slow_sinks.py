"""Trials with a metric sink that environment variables make slow or faulty."""

import os
import pathlib
import signal
import time

from small_trials import DataParallelTrial

from dstrial.loop import metric_sinks


class Sink:
    def open(self, context):
        self.seen = []

    def report(self, group, batches_trained, metrics):
        self.seen.append((group, batches_trained))
        time.sleep(float(os.environ.get("SINK_SLEEPS_S", "0")))
        if os.environ.get("SINK_RAISES_AT") == str(batches_trained):
            raise ValueError(f"the sink refuses batch {batches_trained}")
        if os.environ.get("RECORD_BREAKS_AT") == str(batches_trained):
            record = pathlib.Path(os.environ["DSTRIAL_RUN_DIR"]) / "metrics.jsonl"
            record.rename(record.with_name("kept.jsonl"))
            record.mkdir()
        if os.environ.get("KILLED_AT_REPORT") == str(batches_trained):
            time.sleep(3)  # training goes on meanwhile
            os.kill(os.getpid(), signal.SIGKILL)

    def close(self):
        if "SINK_LOG" in os.environ:
            pathlib.Path(os.environ["SINK_LOG"]).write_text("\n".join(f"{g} {b}" for g, b in self.seen))


metric_sinks.SINKS = (*metric_sinks.SINKS, Sink)


class Talking(DataParallelTrial):
    """Exchanges values between ranks in every batch, and raises at ``raise_at``."""

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        distributed = self.context.distributed
        rank = distributed.get_rank()
        assert distributed.allgather((rank, batch_idx)) == [(0, batch_idx), (1, batch_idx)]
        assert distributed.broadcast("x" * (3000 + rank)) == "x" * 3000
        if self.hparams.get("raise_at") == f"{rank}:{batch_idx}":
            raise LookupError("this batch is bad")
        return super().train_batch(dataloader_iter, epoch_idx, batch_idx)
