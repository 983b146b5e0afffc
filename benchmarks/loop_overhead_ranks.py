"""One rank of the loop-overhead benchmark: trains blocks of micro batches under four loops and times them.

Started by ``loop_overhead.py`` through torchrun. One engine, one process group and one data set serve all
loops, each in a thread of its own, which take turns every few micro batches, never running at the same time:

* ``bare``: DeepSpeed's own loop: draw, forward, backward, step, nothing else;
* ``dstrial``: ``dstrial.Trainer.fit``, which says where the rank is in a mapped file, as below a launcher;
* ``silent``: the same, but says nothing;
* ``huggingface``: ``transformers.Trainer.train``, whose ``training_step`` is the shared step;
* ``determined``: ``determined.pytorch.deepspeed.Trainer.fit`` of Determined 0.38.1, its loop unmodified.

The step that trains one micro batch is the same function under all of them and notes the time when it is
entered, when it has its records and when it returns.

Determined's loop needs these shims, all here:

* ``DeepSpeedTrialContext._init_device`` demands a CUDA GPU; ``AnyDeviceContext`` takes the current device
  of whatever accelerator DeepSpeed has found;
* ``determined.pytorch.deepspeed.init`` counts CUDA GPUs and fixes the context class, so the context is built
  here as ``init`` does it, on ``determined.core.init``;
* with several ranks, ``determined.core.DistributedContext`` gets two free ports instead of its fixed ones.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import logging
import os
import pathlib
import socket
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from concurrent import futures
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from determined import core
from determined.pytorch import deepspeed as determined_deepspeed
from loop_overhead_huggingface import huggingface_loop
from loop_overhead_step import Step, Turns
from loop_overhead_timing import LOOPS, Block, Plan
from torch import nn
from torch.utils import data

import dstrial
import dstrial.loop.data.training
import dstrial.loop.loop
from dstrial.ranks.heartbeat import HEARTBEAT_VARIABLE, Heartbeat, Phase, heartbeat, make_heartbeat_file

NUM_FEATURES = 8
NUM_TARGETS = 4
MICRO_BATCH_SIZE = 4
NUM_VALIDATION_RECORDS = 16
SEED = 7


def engine_config(gradient_accumulation_steps: int) -> dict[str, Any]:
    """Return the DeepSpeed config of every run: plain data parallel, torch's Adam, fp32."""
    return {
        "train_micro_batch_size_per_gpu": MICRO_BATCH_SIZE,
        "gradient_accumulation_steps": gradient_accumulation_steps,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        "steps_per_print": 10**9,
    }


def build_engine(gradient_accumulation_steps: int) -> Any:
    """Build the one engine that all loops train. Ranks: all, collectively."""
    torch.manual_seed(SEED)
    model = nn.Sequential(nn.Linear(NUM_FEATURES, 16), nn.Tanh(), nn.Linear(16, NUM_TARGETS))
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=engine_config(gradient_accumulation_steps)
    )
    return engine


def records(count: int, seed: int) -> data.TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(count, NUM_FEATURES, generator=generator)
    return data.TensorDataset(features, features[:, :NUM_TARGETS] * 0.5)


class _TrialMethods:
    """What both trials have in common, which is everything: the two APIs are the same."""

    step: Step
    num_records: int
    metric_names: tuple[str, ...]

    def build_training_data_loader(self) -> dstrial.DataLoader:
        return dstrial.DataLoader(
            records(self.num_records, SEED), batch_size=MICRO_BATCH_SIZE, shuffle=True, drop_last=True
        )

    def build_validation_data_loader(self) -> dstrial.DataLoader:
        """Return a few records: both loops validate when they end, outside the measured window."""
        return dstrial.DataLoader(records(NUM_VALIDATION_RECORDS, SEED + 1), batch_size=MICRO_BATCH_SIZE)

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:  # noqa: ARG002
        loss = self.step(dataloader_iter)
        return dict.fromkeys(self.metric_names, loss)

    def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:  # noqa: ARG002
        features, targets = next(dataloader_iter)
        outputs = self.step.engine(features.to(self.step.device))
        return {"validation_loss": nn.functional.mse_loss(outputs, targets.to(self.step.device))}


class DstrialTrial(_TrialMethods, dstrial.DeepSpeedTrial):
    def __init__(self, context: Any, step: Step, num_records: int, plan: Plan) -> None:
        self.step, self.num_records = step, num_records
        self.metric_names = plan.metric_names
        context.wrap_model_engine(step.engine)


class DeterminedTrial(_TrialMethods, determined_deepspeed.DeepSpeedTrial):  # type: ignore[misc]
    def __init__(self, context: Any, step: Step, num_records: int, plan: Plan) -> None:
        self.step, self.num_records = step, num_records
        self.metric_names = plan.metric_names
        context.wrap_model_engine(step.engine)


class AnyDeviceContext(determined_deepspeed.DeepSpeedTrialContext):  # type: ignore[misc]
    """Determined's context without its demand for a CUDA GPU."""

    def _init_device(self) -> None:
        self.device = torch.device(get_accelerator().current_device_name())


def bare_loop(step: Step, num_records: int, plan: Plan) -> Callable[[], None]:
    dataset = records(num_records, SEED)
    sampler: Any = data.DistributedSampler(dataset, dist.get_world_size(), dist.get_rank(), seed=SEED)
    loader = data.DataLoader(dataset, MICRO_BATCH_SIZE, sampler=sampler, drop_last=True)

    def run() -> None:
        iterator = iter(loader)
        step.engine.train()
        for _ in range(plan.num_micro_batches):
            step(iterator)

    return run


def dstrial_loop(context: Any, step: Step, num_records: int, plan: Plan) -> Callable[[], None]:
    """Return dstrial's loop, in the context that ``dstrial.init`` made. Ranks: all, collectively."""
    trainer = dstrial.Trainer(DstrialTrial(context, step, num_records, plan), context)

    def run() -> None:
        trainer.fit(
            max_length=dstrial.Batch(plan.num_batches),
            reporting_period=dstrial.Batch(plan.report_every),
            checkpoint_policy="none",
        )

    return run


class SilentHeartbeat(Heartbeat):
    def begin_batch(self, batch: int) -> None:
        """Do nothing."""

    def begin(self, phase: Phase, batch: int) -> None:
        """Do nothing."""


_silent_threads: set[int] = set()


def say_where_we_are(scratch: pathlib.Path) -> None:
    """Have this rank's heartbeats go into a mapped file, but those of silent threads nowhere."""
    path = scratch / f"heartbeats_{os.environ['RANK']}"
    make_heartbeat_file(path, 1)
    os.environ[HEARTBEAT_VARIABLE] = f"0:{path}"
    silent = SilentHeartbeat()

    def chosen() -> Heartbeat:
        return silent if threading.get_ident() in _silent_threads else heartbeat()

    dstrial.loop.loop.heartbeat = chosen  # type: ignore[attr-defined]  # there is no other way to have none
    dstrial.loop.data.training.heartbeat = chosen  # type: ignore[attr-defined]


def silently(loop: Callable[[], None]) -> Callable[[], None]:
    def run() -> None:
        _silent_threads.add(threading.get_ident())
        loop()

    return run


def determined_loop(
    stack: contextlib.ExitStack, step: Step, num_records: int, plan: Plan, checkpoints: pathlib.Path
) -> Callable[[], None]:
    """Return Determined's loop. Ranks: all, collectively."""
    rank, size = dist.get_rank(), dist.get_world_size()
    distributed = None
    if size > 1:
        ports = [free_ports(2)]
        dist.broadcast_object_list(ports, src=0)
        distributed = core.DistributedContext(
            rank=rank,
            size=size,
            local_rank=rank,
            local_size=size,
            cross_rank=0,
            cross_size=1,
            pub_port=ports[0][0],
            pull_port=ports[0][1],
        )
    core_context = stack.enter_context(
        core.init(
            distributed=distributed,
            checkpoint_storage=str(checkpoints),
            tensorboard_mode=core.TensorboardMode.MANUAL,
        )
    )
    context = AnyDeviceContext(
        core_context=core_context,
        trial_seed=SEED,
        hparams=None,
        slots_per_trial=size,
        num_gpus=size,
        exp_conf=None,
        steps_completed=0,
    )
    trainer = determined_deepspeed.Trainer(DeterminedTrial(context, step, num_records, plan), context)

    def run() -> None:
        trainer.fit(
            max_length=dstrial.Batch(plan.num_batches),
            reporting_period=dstrial.Batch(plan.report_every),
            checkpoint_policy="none",
        )

    return run


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for listener in sockets:
            listener.bind(("127.0.0.1", 0))
        return [int(listener.getsockname()[1]) for listener in sockets]


def measure(plan: Plan, scratch: pathlib.Path) -> tuple[dict[str, str], list[Block]]:
    """Run all loops, turn by turn; return the machine and this rank's timings of each block. Ranks: all, collectively."""
    num_records = 2 * plan.num_micro_batches * MICRO_BATCH_SIZE * int(os.environ["WORLD_SIZE"])
    with contextlib.ExitStack() as stack:
        say_where_we_are(scratch)
        context = stack.enter_context(dstrial.init(exp_conf={"name": "loop_overhead"}))
        silent_context = stack.enter_context(dstrial.init(exp_conf={"name": "loop_overhead_silent"}))
        machine = {
            "device": get_accelerator().device_name(),
            "backend": dist.get_backend(),
            "torch": torch.__version__,
            "deepspeed": deepspeed.__version__,
        }
        engine = build_engine(plan.micro_batches_per_batch)
        turns = Turns(len(LOOPS))
        steps = {
            loop: Step(
                engine, context.device, plan, functools.partial(_turn_over, turns, own_idx, plan.period)
            )
            for own_idx, loop in enumerate(LOOPS)
        }
        loops = {
            "bare": bare_loop(steps["bare"], num_records, plan),
            "dstrial": dstrial_loop(context, steps["dstrial"], num_records, plan),
            "silent": silently(dstrial_loop(silent_context, steps["silent"], num_records, plan)),
            "huggingface": huggingface_loop(
                steps["huggingface"],
                records(num_records, SEED),
                MICRO_BATCH_SIZE,
                plan,
                scratch / "huggingface",
            ),
            "determined": determined_loop(
                stack, steps["determined"], num_records, plan, scratch / "determined"
            ),
        }
        pool = stack.enter_context(futures.ThreadPoolExecutor(len(LOOPS)))
        running = [
            pool.submit(_run_in_turns, turns, own_idx, loops[loop], context.device)
            for own_idx, loop in enumerate(LOOPS)
        ]
        for ended in futures.as_completed(running):
            error = ended.exception()
            if error is not None:
                # The other threads and ranks wait for this one, so nothing can be wound up.
                traceback.print_exception(error)
                sys.stderr.flush()
                os._exit(1)
    blocks = [
        Block.from_stamps(loop, block_idx, steps[loop].stamps, plan)
        for loop in LOOPS
        for block_idx in range(plan.num_blocks)
    ]
    return machine, blocks


def _turn_over(turns: Turns, own_idx: int, period: int, micro_batch_idx: int) -> None:
    if own_idx == 0 and dist.get_rank() == 0:
        print(f"@period {micro_batch_idx // period}", flush=True)
    turns.pass_on(own_idx)


def _run_in_turns(turns: Turns, own_idx: int, loop: Callable[[], None], device: torch.device) -> None:
    turns.wait(own_idx)
    if device.index is not None:
        get_accelerator().set_device(device.index)
    loop()
    turns.leave(own_idx)


def main() -> None:
    """Measure, and write the blocks that rank 0 saw as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--plan", type=json.loads, required=True)
    parser.add_argument("--scratch", type=pathlib.Path, required=True)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    plan = Plan(**arguments.plan)
    machine, blocks = measure(plan, arguments.scratch)
    if os.environ["RANK"] == "0":
        result = {**machine, "blocks": [dataclasses.asdict(block) for block in blocks]}
        (arguments.scratch / "blocks.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
