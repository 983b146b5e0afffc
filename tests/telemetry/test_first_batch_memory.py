"""Memory by use in the first batch, measured by operation or by device counters."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from dstrial.engine.model_flops import FlopCounter
from dstrial.telemetry.memory import BY_COUNTERS, BY_STORAGES, FirstBatchMemory


class Device:
    """Fake DeepSpeed accelerator; tests set its memory counter."""

    allocated = 0

    def device_name(self) -> str:
        return "npu"

    def memory_allocated(self) -> int:
        return self.allocated


class CpuAccelerator:
    def device_name(self) -> str:
        return "cpu"


class Engine:
    """The attributes of a DeepSpeed engine without ZeRO that the measurement reads."""

    def __init__(self) -> None:
        self.module = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 1))
        self.optimizer = torch.optim.Adam(self.module.parameters())

    def is_gradient_accumulation_boundary(self) -> bool:
        return True

    def train_batch(self, memory: FirstBatchMemory | None = None) -> None:
        self.module(torch.ones(32, 64)).sum().backward()
        step: Any = self.optimizer.step
        step() if memory is None else memory.around_step(step)
        self.optimizer.zero_grad()


@pytest.fixture
def engine() -> Engine:
    torch.manual_seed(0)
    return Engine()


NUM_BYTES = 4 * (64 * 256 + 256 + 256 + 1)


def test_device_counter_measures_activations_without_operations(engine: Engine) -> None:
    device = Device()
    device.allocated = 1000
    memory = FirstBatchMemory([engine], device)
    memory.begin(None)
    device.allocated = 5000
    memory.entering("forward")
    memory.entering("backward")
    device.allocated = 9000  # of a later micro batch, includes gradients, so does not count
    memory.entering("backward")
    engine.train_batch(memory)

    found = memory.bytes()
    assert memory.found_by == BY_COUNTERS
    assert found["activations_bytes"] == 4000
    assert "tensors_peak_bytes" not in found
    # The tensors are on the CPU, which is the host of this fake device.
    assert found["parameters_bytes"] == 0
    assert found["host_tensors_bytes"] == pytest.approx(4 * NUM_BYTES, rel=0.01)


def test_cpu_activations_are_unknown_without_operations(engine: Engine) -> None:
    memory = FirstBatchMemory([engine], CpuAccelerator())
    memory.begin(None)
    engine.train_batch(memory)

    assert memory.found_by == BY_STORAGES
    assert memory.bytes()["gradients_bytes"] == NUM_BYTES
    assert "activations_bytes" not in memory.bytes()


@pytest.mark.parametrize("moment", ["begin", "operation", "step"])
def test_training_continues_after_measurement_error(
    engine: Engine, moment: str, caplog: pytest.LogCaptureFixture
) -> None:
    memory = FirstBatchMemory([engine], CpuAccelerator())
    module = engine.module
    with caplog.at_level(logging.INFO, "dstrial.telemetry"), FlopCounter() as counter:
        if moment == "begin":
            del engine.module
        memory.begin(counter)
        if moment == "operation":
            assert counter.on_result is not None
            counter.on_result(NO_STORAGE, ())
        engine.module = module
        if moment == "step":
            memory.around_step(lambda: delattr(engine, "module"))
            engine.module = module
        engine.train_batch(memory)

    assert memory.found_by is None
    assert memory.bytes() == {}
    assert any("is not measured" in record.message for record in caplog.records)


class _NoStorage(torch.Tensor):
    """A tensor without a storage, like tensor subclasses of some libraries."""

    def untyped_storage(self) -> Any:
        raise NotImplementedError("no storage")


NO_STORAGE = torch.ones(1).as_subclass(_NoStorage)
