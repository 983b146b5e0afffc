"""Patches of the fake world: effective inside the block, undone after it."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from dstrial.engine.dryrun.fake_world import (
    USER_CONSTANT,
    FakeWorld,
    ScalarReads,
    renew_parameters,
    shapes_only,
)
from dstrial.engine.dryrun.tracker import Tracker


def tracker(**more: Any) -> Tracker:
    return Tracker(**more)


def test_world_patches_and_restores_process() -> None:
    rank_before = os.environ.get("RANK")
    backend = importlib.import_module("deepspeed.comm.torch")
    patched = (backend, "build_shm_op"), (DeepSpeedEngine, "forward"), (torch, "compile")
    before = [getattr(owner, name) for owner, name in patched]
    with FakeWorld(tracker(), world_size=64):
        torch.distributed.all_reduce(torch.ones(3))
        assert torch.distributed.get_world_size() == 64
        assert os.environ["WORLD_SIZE"] == "64"
        assert backend.build_shm_op() is None
        assert all(
            getattr(owner, name) is not old for (owner, name), old in zip(patched, before, strict=True)
        )
    assert [getattr(owner, name) for owner, name in patched] == before
    assert not torch.distributed.is_initialized()
    assert os.environ.get("RANK") == rank_before


@pytest.mark.process
@pytest.mark.parametrize("optimizer_class", [DeepSpeedCPUAdam, FusedAdam])
def test_compiled_optimizers_step_without_compiler(optimizer_class: type) -> None:
    with FakeWorld(tracker()), FakeTensorMode():
        parameter = nn.Parameter(torch.zeros(10))
        optimizer = optimizer_class([parameter])
        parameter.grad = torch.zeros(10)
        optimizer.step()
    assert {"exp_avg", "exp_avg_sq"} <= set(optimizer.state[parameter])


def test_fake_world_compiles_nothing() -> None:
    layer = nn.Linear(2, 2)
    with FakeWorld(tracker()):
        assert torch.compile(layer, dynamic=True) is layer

        @torch.compile(fullgraph=True)
        def double(value: int) -> int:
            return 2 * value

        layer.compile()
        assert double(3) == 6
    assert layer._compiled_call_impl is None


def test_distributions_accept_fake_tensors_without_validation() -> None:
    with FakeTensorMode():
        low, high = torch.empty(()), torch.empty(())
        with pytest.raises((ValueError, DataDependentOutputException)):
            torch.distributions.Uniform(low, high)
        with FakeWorld(tracker()):
            assert torch.distributions.Uniform(low, high).rsample((3,)).shape == (3,)


def test_scalar_read_returns_constant_and_records_line() -> None:
    reads = ScalarReads()
    with FakeTensorMode(), tracker(read_scalar=reads):
        assert torch.zeros(2).sum().item() == USER_CONSTANT
        assert int(torch.zeros((), dtype=torch.int64)) == int(USER_CONSTANT)
    assert all(Path(place.rsplit(":", 1)[0]) == Path(__file__) for place in reads.bypasses)
    assert len(reads.bypasses) == 2
    with FakeTensorMode(), pytest.raises(DataDependentOutputException):
        torch.zeros(()).item()


def test_library_scalar_reads_return_fixed_values() -> None:
    """DeepSpeed reads 0 (no overflow); torch's optimizers read 1 (first step)."""
    reads = ScalarReads()
    read = "def read(tensor):\n    return tensor.item()\n"
    told = []
    for library in (Path(deepspeed.__file__).parent / "runtime", Path(torch.__file__).parent / "optim"):
        namespace: dict[str, Any] = {}
        exec(compile(read, str(library / "some.py"), "exec"), namespace)
        with FakeTensorMode(), tracker(read_scalar=reads):
            told.append(namespace["read"](torch.zeros(())))
    assert told == [0.0, 1.0]
    assert not reads.bypasses


def test_shapes_only_keeps_shape_type_and_gradient_flag() -> None:
    with shapes_only():
        layer = nn.Linear(64, 32, bias=False)
        layer.requires_grad_(False)
        moved = nn.Linear(4, 4).to(device="cpu", dtype=torch.bfloat16)
        unfilled = nn.init.constant_(torch.zeros(3), 7.0)
        with deepspeed.zero.Init(config_dict_or_path={"train_batch_size": 1}):
            undivided = nn.Linear(4, 2)
            deepspeed.zero.Init(module=undivided)

    assert (layer.weight.is_meta, layer.weight.shape, layer.weight.requires_grad) == (True, (32, 64), False)
    assert (moved.weight.is_meta, moved.weight.dtype) == (True, torch.bfloat16)
    assert (undivided.weight.is_meta, undivided.weight.shape) == (True, (2, 4))
    assert not hasattr(undivided.weight, "ds_id")
    assert unfilled.tolist() == [0.0, 0.0, 0.0]
    assert not nn.Linear(2, 2).weight.is_meta
    assert nn.init.constant_(torch.zeros(3), 7.0).tolist() == [7.0, 7.0, 7.0]


def test_renewed_parameters_have_memory_and_stay_tied() -> None:
    with shapes_only():
        model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False), nn.BatchNorm1d(3))
        model[1].weight = model[0].weight
    old = model[0].weight

    renewed = renew_parameters(model)

    assert renewed[id(old)] is model[0].weight is model[1].weight
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert model[2].running_mean.shape == (3,)
