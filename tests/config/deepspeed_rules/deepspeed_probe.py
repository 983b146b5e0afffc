"""Initialize the installed DeepSpeed with each config in a fork; print results.

Reads a JSON list of ``{"config": …, "pipeline": bool, "steps": int}`` from standard input. Prints a JSON list with
one result per config: "accepted", the exception, or the largest change of a weight if ``steps`` asks for training. The process
is one gloo rank on the CPU, patched to claim support of fp16.
"""

import json
import logging
import os
import sys
import tempfile

os.environ.update(
    {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
)

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.zero.muon import muon_optimizer  # noqa: F401 - its import compiles for seconds: once, before forking
from deepspeed.utils import logger

from dstrial.ranks.process_group import without_compiled_collectives

logger.setLevel(logging.ERROR)


def attempt(case):
    """Initialize an engine and train if ``steps`` is given; return the result."""
    with tempfile.TemporaryDirectory() as directory:
        store = torch.distributed.FileStore(f"{directory}/store", 1)
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        with without_compiled_collectives(is_cpu=True):
            deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
        try:
            if case["pipeline"]:
                model = PipelineModule([torch.nn.Linear(4, 4)], num_stages=1, loss_fn=torch.nn.MSELoss())
            else:
                model = torch.nn.Sequential(torch.nn.Linear(4, 4))
            get_accelerator().is_fp16_supported = lambda: True
            engine, *_ = deepspeed.initialize(
                model=model, model_parameters=model.parameters(), config=case["config"]
            )
            if case.get("steps"):
                return str(change_after(engine, case["steps"]))
        except BaseException as error:  # noqa: BLE001 - whatever DeepSpeed raises is the result
            return f"{type(error).__name__}: {error}"
        return "accepted"


def change_after(engine, num_steps):
    """Train for ``num_steps``; return the largest absolute change of a weight."""
    torch.manual_seed(1)
    weight = engine.module[0].weight
    before = weight.detach().float().clone()
    for _ in range(num_steps):
        inputs, targets = torch.randn(2, 4, 4, dtype=weight.dtype)
        engine.backward(torch.nn.functional.mse_loss(engine(inputs), targets))
        engine.step()
    return float((engine.module[0].weight.detach().float() - before).abs().max())


def run_in_fork(case):
    """Run ``attempt`` in a child process: DeepSpeed keeps process groups in globals."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        with os.fdopen(writer, "w") as pipe:
            pipe.write(attempt(case))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        outcome = pipe.read()
    os.waitpid(child, 0)
    return outcome or "died"


if __name__ == "__main__":
    outcomes = [run_in_fork(case) for case in json.load(sys.stdin)]
    sys.stdout.write("\n" + json.dumps(outcomes))
