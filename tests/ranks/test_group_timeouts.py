"""Timeouts of the process groups that DeepSpeed and users create."""

from __future__ import annotations

import pytest

from dstrial.testing.ranks import run_function

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(120)]


def _timeouts() -> list[float]:
    """Return the timeout of each process group of this rank, in seconds."""
    import torch
    from torch.distributed import distributed_c10d

    groups = list(distributed_c10d._world.pg_map)
    return [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]  # type: ignore[attr-defined]


def make_groups(kind: str) -> dict[str, object]:
    import datetime
    import os

    import deepspeed
    import torch
    import torch.distributed as dist
    from deepspeed.pipe import PipelineModule
    from torch.distributed import distributed_c10d

    from dstrial.ranks.identity import identify
    from dstrial.ranks.process_group import init_process_group, shutdown

    before = distributed_c10d._get_default_timeout
    init_process_group(identify(os.environ), timeout_s=77.0)
    layers = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)]
    model = (
        PipelineModule(layers, num_stages=2, loss_fn=torch.nn.functional.mse_loss)
        if kind == "pipeline"
        else torch.nn.Sequential(*layers)
    )
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
        "zero_optimization": {"stage": 3 if kind == "zero 3" else 1},
    }
    deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    own = dist.new_group(timeout=datetime.timedelta(seconds=5))
    of_own = own._get_backend(torch.device("cpu")).options._timeout.total_seconds()  # type: ignore[union-attr]
    found = _timeouts()
    dist.barrier()  # no rank may shut down while others still connect to it
    shutdown()
    return {"all": found, "own": of_own, "is_undone": distributed_c10d._get_default_timeout is before}


@pytest.mark.parametrize("kind", ["zero 1", "zero 3", "pipeline"])
def test_deepspeed_groups_inherit_default_group_timeout(kind: str) -> None:
    for told in (result.value for result in run_function(make_groups, 2, kind)):
        assert len(told["all"]) > 2
        assert sorted(told["all"]) == [5.0] + [77.0] * (len(told["all"]) - 1)
        assert told["own"] == 5.0, "who gives a time-out has it"
        assert told["is_undone"]
