"""Measure how long training waits for a checkpoint, against ``engine.save_checkpoint`` of bare DeepSpeed.

Usage: ``python benchmarks/save_stall.py [--checkpoints N] [--stage Z] [--width W]``, one rank. The same model is trained in turns
by a bare loop and by ``Trainer.fit``; both save after every tenth batch. The stall of a checkpoint is the time from the end of
the batch before to the beginning of the batch after, minus the median of that time without a checkpoint.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
from gpt_model import GPT, Shape

import dstrial

PERIOD = 10


def config(stage: int) -> dict[str, Any]:
    optimizer = {"type": "Adam", "params": {"lr": 1e-4, "torch_adam": True}}
    return {"train_batch_size": 1, "optimizer": optimizer, "zero_optimization": {"stage": stage}}


class Gaps:
    """Times between training steps."""

    def __init__(self, engine: Any, shape: Shape) -> None:
        self.engine, self.left, self.gaps = engine, 0.0, list[float]()
        tokens = torch.randint(shape.vocabulary, (1, shape.sequence_length + 1))
        self.batch = tokens[:, :-1], tokens[:, 1:]

    def step(self) -> torch.Tensor:
        entered = time.perf_counter()
        if self.left:
            self.gaps.append(entered - self.left)
        loss = self.engine(*self.batch)
        self.engine.backward(loss)
        self.engine.step()
        self.left = time.perf_counter()
        return loss

    def stalls(self) -> list[float]:
        after = self.gaps[PERIOD - 1 :: PERIOD]
        usual = statistics.median(gap for idx, gap in enumerate(self.gaps) if idx % PERIOD != PERIOD - 1)
        return [gap - usual for gap in after]


def bare(stage: int, shape: Shape, num_checkpoints: int) -> list[float]:
    model = GPT(shape)
    with tempfile.TemporaryDirectory() as directory:
        store = torch.distributed.FileStore(f"{directory}/store", 1)
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        os.environ["LOCAL_RANK"] = "0"
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=config(stage)
        )
        gaps = Gaps(engine, shape)
        for batch in range(PERIOD * num_checkpoints + 1):
            gaps.step()
            if (batch + 1) % PERIOD == 0:
                engine.save_checkpoint(directory, tag=f"batch_{batch + 1}")
    return gaps.stalls()


def ours(stage: int, shape: Shape, num_checkpoints: int) -> list[float]:
    class Trial(dstrial.DeepSpeedTrial):
        def __init__(self, context: Any) -> None:
            model = GPT(shape)
            engine, *_ = deepspeed.initialize(
                model=model, model_parameters=model.parameters(), config=config(stage)
            )
            self.gaps = Gaps(context.wrap_model_engine(engine), shape)

        def build_training_data_loader(self) -> Any:
            return dstrial.DataLoader(range(10**6), batch_size=1)

        build_validation_data_loader = build_training_data_loader

        def train_batch(self, dataloader_iter: Any, *_: int) -> Any:
            next(dataloader_iter)
            return {"loss": self.gaps.step()}

        def evaluate_batch(self, dataloader_iter: Any, *_: int) -> Any:
            next(dataloader_iter)
            return {"loss": 0.0}

    settings = {"data": {"dstrial": {"telemetry": False}}, "searcher": {"name": "single", "metric": "loss"}}
    with (
        tempfile.TemporaryDirectory() as directory,
        dstrial.init(hparams={}, exp_conf=settings, run_dir=f"{directory}/run") as context,
    ):
        trial = Trial(context)
        dstrial.Trainer(trial, context).fit(
            max_length=dstrial.Batch(PERIOD * num_checkpoints + 1),
            checkpoint_period=dstrial.Batch(PERIOD),
            validation_period=dstrial.Batch(10**6),
            reporting_period=dstrial.Batch(10**6),
            checkpoint_policy="none",
        )
    return trial.gaps.stalls()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoints", type=int, default=6)
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--width", type=int, default=512)
    given = parser.parse_args()
    shape = Shape(width=given.width)
    found = {
        name: run(given.stage, shape, given.checkpoints) for name, run in (("dstrial", ours), ("bare", bare))
    }
    num_parameters = sum(one.numel() for one in GPT(shape).parameters())
    medians = {name: statistics.median(stalls) for name, stalls in found.items()}
    sys.stdout.write(
        f"load {os.getloadavg()[0]:.1f}, ZeRO {given.stage}, {num_parameters / 1e6:.1f} M parameters\n"
        f"| loop | stall of a checkpoint, median | largest |\n|---|---|---|\n"
        + "".join(
            f"| {name} | {1e3 * medians[name]:.1f} ms | {1e3 * max(stalls):.1f} ms |\n"
            for name, stalls in found.items()
        )
        + f"ratio {medians['dstrial'] / medians['bare']:.2f}\n"
    )


if __name__ == "__main__":
    main()
