"""What a run's instruments cost: blocks of batches with and without them in turns, on one engine in one process.

    python benchmarks/telemetry_overhead.py [--pairs 300] [--report-every 10 100] [--accumulation 1 4]

Real DeepSpeed steps of a small network, each batch followed by a copy that leaves nothing in the caches, as a larger
network would. A block is what lies between two reports. With instruments the engines and the loader are timed, and at its end
there is the sample that a report sends; without, the listener only passes calls on (a microsecond). Two blocks side by side are
a pair, the first of which has them in every other pair. What is added is the median of pairs, in the processor's time:
microseconds a batch, which do not depend on how long a batch is. The thread that writes reports is measured by itself; the last
column counts all of its time, as if training had waited for it.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import pickle
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import deepspeed
import torch
from torch import nn

import dstrial
from dstrial.loop.data.training import CountingIterator
from dstrial.telemetry.instruments import Instruments
from dstrial.telemetry.reporting import TelemetryReports

_BATCH_S = 10e-3


class Training:
    """A small network that trains batch after batch.

    Args:
        accumulation: micro batches of a batch.
    """

    def __init__(self, accumulation: int) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8))
        config = {
            "train_micro_batch_size_per_gpu": 8,
            "gradient_accumulation_steps": accumulation,
            "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
            "zero_optimization": {"stage": 1},
        }
        self.engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=config
        )
        records: Iterator[Any] = itertools.repeat((torch.randn(8, 64), torch.randn(8, 8)))
        self.iterator = CountingIterator(records, 0, 0, accumulation)
        self._accumulation = accumulation
        self._swept = torch.zeros(2**22)

    def train(self, num_batches: int) -> None:
        """Train so many batches."""
        for _ in range(num_batches):
            for _ in range(self._accumulation):
                features, targets = next(self.iterator)
                loss = nn.functional.mse_loss(self.engine(features), targets)
                self.engine.backward(loss)
                self.engine.step()
            self._swept.add_(1.0)


def seconds(call: Callable[[], object]) -> float:
    """Return how much of the processor's time a call takes, which other programs do not change."""
    began_s = time.process_time()
    call()
    return time.process_time() - began_s


def block_with(training: Training, instruments: Instruments, num_batches: int) -> float:
    """Train a block with instruments, up to the sample as it is sent; return its seconds."""

    def block() -> None:
        instruments.switch(True)
        training.train(num_batches)
        instruments.switch(False)
        instruments.trained(1.0)
        pickle.dumps(instruments.sample(num_batches).wait())

    training.iterator.watch = instruments.drew
    taken_s = seconds(block)
    training.iterator.watch = None
    return taken_s


def added_s(training: Training, num_batches: int, num_pairs: int) -> tuple[float, float]:
    """Return seconds of a batch, and what instruments add to it."""
    plain, more = [], []
    with Instruments([training.engine], 0) as instruments:
        for pair in range(num_pairs + 2):
            told_s = block_with(training, instruments, num_batches) if pair % 2 else 0.0
            silent_s = seconds(functools.partial(training.train, num_batches))
            told_s = told_s or block_with(training, instruments, num_batches)
            plain.append(silent_s / num_batches)
            more.append((told_s - silent_s) / num_batches)
    return statistics.median(plain[2:]), statistics.median(more[2:])


def writing_s(context: Any, num_reports: int = 200) -> float:
    """Return how long it takes to write a report of one rank into a run directory and TensorBoard."""
    training = Training(1)
    with Instruments([training.engine], 0) as instruments:
        instruments.trained(1.0)
        sample = instruments.sample(10).wait()
    train, writer = context._core.train, context.get_tensorboard_writer()

    def record(batches: int, metrics: dict[str, Any]) -> None:
        train.report_metrics("telemetry", batches, metrics)
        for name, value in metrics.items():
            if isinstance(value, (int, float)):
                writer.add_scalar(f"Telemetry/{name}", value, batches)

    reports = TelemetryReports(record, lambda _totals: None, None)
    return statistics.median(
        seconds(functools.partial(reports.write, [sample], idx, 80, 0)) for idx in range(num_reports)
    )


def first_batch_s(num_times: int = 9) -> tuple[float, float]:
    """Return how long a batch of this network takes, and how long one whose FLOPs are counted."""
    training = Training(1)
    training.train(5)
    plain = statistics.median(seconds(lambda: training.train(1)) for _ in range(num_times))
    with Instruments([training.engine], 0) as instruments:
        counted = statistics.median(
            seconds(lambda: instruments.first_batch(training.train)(1)) for _ in range(num_times)
        )
    return plain, counted


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pairs", type=int, default=300)
    parser.add_argument("--report-every", type=int, nargs="+", default=[10, 100])
    parser.add_argument("--accumulation", type=int, nargs="+", default=[1, 4])
    args = parser.parse_args()
    torch.set_num_threads(1)
    with (
        tempfile.TemporaryDirectory() as scratch,
        dstrial.init(hparams={}, exp_conf={}, run_dir=scratch) as context,
    ):
        print_table(context, args.pairs, args.report_every, args.accumulation)


def print_table(context: Any, num_pairs: int, periods: list[int], accumulations: list[int]) -> None:
    """Measure, and print a line as soon as it is known."""
    thread_s = writing_s(context)
    print("report every  micro batches  batch ms  us more a batch  % of 10 ms  % with the thread's time")
    for accumulation in accumulations:
        training = Training(accumulation)
        for report_every in periods:
            pairs = max(num_pairs * 10 // report_every, 30)
            batch_s, more_s = added_s(training, report_every, pairs)
            shares = [100 * value / _BATCH_S for value in (more_s, more_s + thread_s / report_every)]
            print(
                f"{report_every:>12}  {accumulation:>13}  {1e3 * batch_s:>8.2f}  {1e6 * more_s:>15.1f}  {shares[0]:>10.2f}  "
                f"{shares[1]:>24.2f}",
                flush=True,
            )
    plain_s, counted_s = first_batch_s()
    print(f"the thread writes a report in {1e3 * thread_s:.2f} ms")
    print(f"a batch takes {1e3 * plain_s:.2f} ms, one whose FLOPs are counted {1e3 * counted_s:.2f} ms")


if __name__ == "__main__":
    main()
