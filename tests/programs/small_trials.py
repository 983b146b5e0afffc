"""Small trials for the training loop: a network with dropout and its pipeline."""

import json
import multiprocessing
import os
import pathlib
import signal
import threading
import time

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from small_records import Records
from torch import nn

from dstrial import DataLoader, DeepSpeedTrial, PyTorchCallback, overwrite_deepspeed_config


def wait_until_saved(deadline_s=60):
    """Wait until no checkpoint is being written, so that a kill is deterministic."""
    if "DSTRIAL_RUN_DIR" not in os.environ:
        return
    checkpoints = pathlib.Path(os.environ["DSTRIAL_RUN_DIR"]) / "checkpoints"
    give_up_at_s = time.monotonic() + deadline_s
    while list(checkpoints.glob("*.saving")):
        assert time.monotonic() < give_up_at_s, "a checkpoint is never completed"
        time.sleep(0.01)


def kill_if_asked(rank, batch_idx):
    """Kill this rank at KILL_AT (rank:batch) unless the file KILL_MARKER exists."""
    marker = pathlib.Path(os.environ.get("KILL_MARKER", "/nonexistent"))
    if os.environ.get("KILL_AT") == f"{rank}:{batch_idx}" and not marker.exists():
        wait_until_saved()
        marker.write_text("killed")
        os.kill(os.getpid(), signal.SIGKILL)


def kill_in_save_if_asked(rank):
    """Kill this rank when the save in KILL_IN_SAVE (rank:number) begins."""
    of_rank, _, number = os.environ.get("KILL_IN_SAVE", "-1:0").partition(":")
    if int(of_rank) != rank:
        return
    checkpoints = pathlib.Path(os.environ["DSTRIAL_RUN_DIR"]) / "checkpoints"
    left = {path.parent.name for path in checkpoints.glob("*.saving/writer.json")}

    def watch():
        seen = set()
        while True:
            seen |= {path.parent.name for path in checkpoints.glob("*.saving/writer.json")} - left
            if len(seen) >= int(number):
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.0005)

    threading.Thread(target=watch, daemon=True).start()


class EpochLog(PyTorchCallback):
    """Logs the start and the end of every epoch on rank 0."""

    def __init__(self, path, is_chief):
        self.path = path
        self.is_chief = is_chief

    def note(self, text):
        if self.is_chief and self.path:
            with open(self.path, "a") as file:
                file.write(text + "\n")

    def on_training_epoch_start(self, epoch_idx):
        self.note(f"start {epoch_idx}")

    def on_training_epoch_end(self, epoch_idx):
        self.note(f"end {epoch_idx}")


class Common(DeepSpeedTrial):
    def __init__(self, context):
        self.context = context
        self.hparams = context.get_hparams()
        self.model_engine = context.wrap_model_engine(self.build_engine())
        if "watch_log" in self.hparams:
            self.watch_collectives()
        kill_in_save_if_asked(context.distributed.get_rank())

    def watch_collectives(self):
        """Log each collective of the training loop with the current batch number."""
        distributed = self.context.distributed
        self.watched_batch = 0
        path = pathlib.Path(f"{self.hparams['watch_log']}.{distributed.get_rank()}")

        def watch(name, original):
            def watched(*args, **kwargs):
                if self.watched_batch:
                    with path.open("a") as file:
                        file.write(json.dumps([self.watched_batch, name]) + "\n")
                return original(*args, **kwargs)

            setattr(distributed, name, watched)

        for name in ("allgather", "gather", "broadcast"):
            watch(name, getattr(distributed, name))

    def disturb(self, batch_idx):
        rank = self.context.distributed.get_rank()
        self.watched_batch = batch_idx + 1
        kill_if_asked(rank, batch_idx)
        time.sleep(self.hparams.get("batch_sleep_s", 0.0))
        if self.hparams.get("request_stop_at") == f"{rank}:{batch_idx}":
            self.context.set_stop_requested(True)

    def ds_config(self):
        return overwrite_deepspeed_config(
            self.hparams["deepspeed_config"], self.hparams.get("overwrite_deepspeed_args") or {}
        )

    def build_training_data_loader(self):
        workers = self.hparams.get("num_workers", 0)
        if workers:
            multiprocessing.set_forkserver_preload(["torch.utils.data"])  # imported once, not by each worker
        return DataLoader(
            Records(self.hparams.get("num_records", 64), 1, self.hparams.get("noise", 0.0)),
            batch_size=self.context.get_train_micro_batch_size_per_gpu(),
            shuffle=True,
            num_workers=workers,
            # Not forked: a fork of a process that has communication threads may inherit a lock that one of them holds.
            multiprocessing_context="forkserver" if workers else None,
            drop_last=self.hparams.get("drop_last", False),
        )

    def build_validation_data_loader(self):
        return DataLoader(
            Records(self.hparams.get("num_validation_records", 21), 2),
            batch_size=self.context.get_train_micro_batch_size_per_gpu(),
        )

    def build_callbacks(self):
        return {"epochs": EpochLog(self.hparams.get("epoch_log"), self.context.distributed.get_rank() == 0)}


class DataParallelTrial(Common):
    def build_engine(self):
        torch.manual_seed(11)
        dropout = nn.Dropout(self.hparams.get("dropout", 0.2))
        model = nn.Sequential(nn.Linear(8, 16), dropout, nn.Tanh(), nn.Linear(16, 4))
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=self.ds_config()
        )
        return engine

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        features, targets = self.context.to_device(next(dataloader_iter))
        self.disturb(batch_idx)
        loss = nn.functional.mse_loss(self.model_engine(features), targets)
        self.model_engine.backward(loss)
        self.model_engine.step()
        return {"loss": loss, "batch_idx": batch_idx, "epoch_idx": epoch_idx}

    def evaluate_batch(self, dataloader_iter, batch_idx):
        features, targets = self.context.to_device(next(dataloader_iter))
        loss = nn.functional.mse_loss(self.model_engine(features), targets)
        return {"validation_loss": loss, "mean_size": float(len(features))}


def pipeline_loss(outputs, targets):
    return nn.functional.mse_loss(outputs, targets)


class PipelineTrial(Common):
    def build_engine(self):
        torch.manual_seed(11)
        layers = [
            LayerSpec(nn.Linear, 8, 16),
            LayerSpec(nn.Dropout, 0.2),
            LayerSpec(nn.Tanh),
            LayerSpec(nn.Linear, 16, 4),
        ]
        module = PipelineModule(
            layers=layers, num_stages=2, loss_fn=pipeline_loss, partition_method="uniform"
        )
        engine, *_ = deepspeed.initialize(
            model=module,
            model_parameters=[p for p in module.parameters() if p.requires_grad],
            config=self.ds_config(),
        )
        return engine

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        self.disturb(batch_idx)
        return {"loss": self.model_engine.train_batch(), "batch_idx": batch_idx, "epoch_idx": epoch_idx}

    def evaluate_batch(self, dataloader_iter, batch_idx):
        return {"validation_loss": self.model_engine.eval_batch()}


class SolvedPipelineTrial(PipelineTrial):
    """Lets dstrial compute the batch sizes, with the stages set in ``data.dstrial``."""

    def ds_config(self):
        return self.context.get_deepspeed_config()


class ByHandTrial(DataParallelTrial):
    """Trains ``micro_batches`` micro batches per call of ``train_batch``."""

    def __init__(self, context):
        super().__init__(context)
        context.disable_auto_grad_accumulation()

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        for _ in range(self.hparams["micro_batches"]):
            metrics = super().train_batch(dataloader_iter, epoch_idx, batch_idx)
        return metrics


class TwoLossesTrial(DataParallelTrial):
    """Calls backward for each of two losses, and step once."""

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        features, targets = self.context.to_device(next(dataloader_iter))
        for sign in (1, -1):
            loss = nn.functional.mse_loss(self.model_engine(sign * features), targets)
            self.model_engine.backward(loss)
        self.model_engine.step()
        return {"loss": loss}
