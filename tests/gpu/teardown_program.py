"""Train and tear down three configurations three times; check for leaks."""

import os

import torch

from dstrial.ranks.identity import identify
from dstrial.ranks.process_group import init_process_group, prepare_accelerator, shutdown

prepare_accelerator()
identity = identify(os.environ)
init_process_group(identity, timeout_s=60)

import deepspeed  # noqa: E402  # after the accelerator is chosen
import torch.distributed as dist  # noqa: E402

from dstrial.dsat.rank.cleanup import ProcessState, process_usage  # noqa: E402

assert dist.get_backend() == "nccl", dist.get_backend()
DEVICE = torch.device("cuda", 0)


def engine_of(stage):
    model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "overlap_comm": True},
        "optimizer": {"type": "Adam", "params": {"lr": 0.001, "torch_adam": True}},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine


def train(engine):
    for _ in range(3):
        records = torch.randn(4, 256, device=DEVICE, dtype=torch.bfloat16)
        loss = engine(records).float().pow(2).mean()
        engine.backward(loss)
        engine.step()
    return loss.item()


state = ProcessState()
baseline, losses = None, []
for _ in range(3):
    for stage in (1, 2, 3):
        group = dist.new_group([0])
        torch.manual_seed(0)
        made = [engine_of(stage)]
        torch.backends.cuda.matmul.allow_tf32 = True
        losses.append(train(made[0]))
        dist.all_reduce(
            torch.ones(1 << 24, device=DEVICE), group=group
        )  # may still run when its group is destroyed
        del group
        state.restore(made)
        assert not torch.backends.cuda.matmul.allow_tf32
    left = process_usage()
    grown = [] if baseline is None else left.grown_over(baseline)
    assert not grown, grown
    baseline = baseline or left
assert losses[:3] == losses[3:6] == losses[6:9], losses
shutdown()
print("nothing has grown")
