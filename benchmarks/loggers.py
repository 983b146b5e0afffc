"""Measure what loggers cost training: batches per second with each one, against none, in the same process.

Usage: ``python benchmarks/loggers.py [--batches N] [--rounds N] [--report-every N] [--width N]``, in an environment with all
of them, which ``make test-loggers`` makes.

Every round trains once with each choice, in another order, so that what else the machine does meets all of them. The table has
the ratio of the best times, the median ratio of a round's own times, and the ratio of CPU time of the process, which depends
least on what else runs there; W&B's own process is not in it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import statistics
import tempfile
import time
from typing import Any

import deepspeed
import torch
from torch import nn
from torch.utils.data import TensorDataset

from dstrial import Batch, DataLoader, DeepSpeedTrial, Trainer, init

CHOICES: dict[str, list[str]] = {
    "none": [],
    "wandb (offline)": ["wandb"],
    "mlflow (SQLite)": ["mlflow"],
    "trackio": ["trackio"],
    "all three": ["wandb", "mlflow", "trackio"],
}
SKIPPED = 0.1
"""Share of the batches before the clock starts."""


class Timed(DeepSpeedTrial):
    """A small network on the CPU: the shortest batches, beside which a logger costs most."""

    batches = 0
    width = 256
    seconds = 0.0
    cpu_seconds = 0.0

    def __init__(self, context: Any) -> None:
        self.context = context
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, Timed.width), nn.Tanh(), nn.Linear(Timed.width, 1))
        config = {
            "train_micro_batch_size_per_gpu": 32,
            "gradient_accumulation_steps": 1,
            "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        }
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        self.engine = context.wrap_model_engine(engine)

    def build_training_data_loader(self) -> Any:
        """Make records of noise, 100 batches an epoch."""
        return DataLoader(TensorDataset(torch.randn(3200, 64), torch.randn(3200, 1)), batch_size=32)

    def build_validation_data_loader(self) -> Any:
        """Make one batch of noise."""
        return DataLoader(TensorDataset(torch.randn(32, 64), torch.randn(32, 1)), batch_size=32)

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> Any:  # noqa: ARG002  # the API's
        """Train a batch; the first that counts starts the clock, the last one stops it."""
        if batch_idx == int(Timed.batches * SKIPPED):
            self.start_s, self.start_cpu_s = time.perf_counter(), time.process_time()
        features, targets = self.context.to_device(next(dataloader_iter))
        loss = nn.functional.mse_loss(self.engine(features), targets)
        self.engine.backward(loss)
        self.engine.step()
        if batch_idx == Timed.batches - 1:
            Timed.seconds = time.perf_counter() - self.start_s
            Timed.cpu_seconds = time.process_time() - self.start_cpu_s
        return {"loss": loss, **{f"metric_{idx}": float(idx) for idx in range(8)}}

    def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> Any:  # noqa: ARG002  # the API's
        """Evaluate a batch."""
        features, targets = self.context.to_device(next(dataloader_iter))
        return {"validation_loss": nn.functional.mse_loss(self.engine(features), targets)}


def seconds_with(loggers: list[str], batches: int, report_every: int) -> tuple[float, float]:
    """Train once, and return the seconds of the batches that count, by the clock and of CPU time."""
    Timed.batches = batches
    config = {"name": "loggers", "data": {"dstrial": {"loggers": loggers}}}
    with contextlib.redirect_stdout(None), init(exp_conf=config, enable_tensorboard_logging=False) as context:
        Trainer(Timed(context), context).fit(
            max_length=Batch(batches), reporting_period=Batch(report_every), checkpoint_policy="none"
        )
    return Timed.seconds, Timed.cpu_seconds


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description="Measure what loggers cost training.")
    parser.add_argument("--batches", type=int, default=2000, help="batches of one training")
    parser.add_argument("--rounds", type=int, default=5, help="how often each choice is measured")
    parser.add_argument("--report-every", type=int, default=20, help="batches between two reports")
    parser.add_argument(
        "--width", type=int, default=Timed.width, help="of the network: 256 takes a millisecond a batch"
    )
    args = parser.parse_args()
    Timed.width = args.width
    with tempfile.TemporaryDirectory() as work:
        os.environ["DSTRIAL_RUNS_DIR"] = str(pathlib.Path(work) / "runs")
        os.environ["TRACKIO_DIR"] = str(pathlib.Path(work) / "trackio")
        os.environ["WANDB_MODE"] = "offline"
        names = list(CHOICES)
        measured: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
        seconds_with(CHOICES["all three"], args.report_every * 2, args.report_every)  # imports
        for round_idx in range(args.rounds):
            turn = round_idx % len(names)
            for name in names[turn:] + names[:turn]:
                measured[name].append(seconds_with(CHOICES[name], args.batches, args.report_every))
    print(
        f"{args.batches} batches of width {args.width}, a report of 11 metrics every {args.report_every}, {args.rounds} rounds\n"
    )
    print(
        "| loggers | batches/s (best) | ratio of the best | median ratio | CPU ratio |\n|---|---:|---:|---:|---:|"
    )
    counted = args.batches - int(args.batches * SKIPPED)
    best = min(seconds for seconds, _ in measured["none"])
    for name, found in measured.items():
        pairs = list(zip(measured["none"], found, strict=True))
        by_clock = [without / with_one for (without, _), (with_one, _) in pairs]
        by_cpu = [without / with_one for (_, without), (_, with_one) in pairs]
        own = min(seconds for seconds, _ in found)
        print(
            f"| {name} | {counted / own:.0f} | {best / own:.3f} | {statistics.median(by_clock):.3f} "
            f"| {statistics.median(by_cpu):.3f} |"
        )


if __name__ == "__main__":
    main()
