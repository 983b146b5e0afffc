"""ZeRO 3 has gathered all of its small parameters when a gather returns, not only the last one."""

from __future__ import annotations

import os

import pytest

from dstrial.testing.ranks import run_function

pytestmark = pytest.mark.ranks


def gathered_at_once() -> list[float]:
    from dstrial.ranks import identify, init_process_group, shutdown

    init_process_group(identify(os.environ), timeout_s=60)
    import deepspeed
    import torch

    from dstrial.engine.deepspeed_internals import optimizers

    # A large one is on its way when a small one has arrived.
    model = torch.nn.Sequential(torch.nn.Linear(2048, 2048), torch.nn.Linear(2048, 1))
    zero = {"stage": 3, "stage3_param_persistence_threshold": 10**9}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "Adam", "params": {"torch_adam": True}},
        "zero_optimization": zero,
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)
    least = []
    for value in (7.0, 8.0, 9.0):
        for param in engine.module.parameters():
            param.ds_tensor.fill_(value)
            param.data.fill_(value)
        optimizers.gather_persistent(engine.optimizer)
        least += [float(param.detach().min()) / value for param in engine.module.parameters()]
    shutdown()
    return least


def test_all_parameters_are_there_when_they_are_gathered() -> None:
    for result in run_function(gathered_at_once, 2, deadline_s=120):
        assert result.value == [1.0] * 12
