"""What predictions start from, and what a measurement says of the model. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from dstrial.dsat.core.outcome import Measured
from dstrial.dsat.predictor.hardware import Machine
from dstrial.engine.dryrun.values import DryRunResult

UNDESCRIBED = "nothing"
_COUNTED_AT = 4  # micro batch size at which FLOPs of a record are counted


@dataclasses.dataclass(frozen=True, slots=True)
class PredictInputs:
    """The inputs of predictions."""

    runs: Mapping[str, DryRunResult] = dataclasses.field(default_factory=dict)  # by ``ConfigGroups.run_key``
    failures: Mapping[str, str] = dataclasses.field(default_factory=dict)  # key -> why there is no run
    machine: Machine | None = None  # None to learn it from the first measurement
    capacity_bytes: float | None = None  # of one device; None as above
    is_cpu: bool = False
    described_by: str = UNDESCRIBED  # or ``fake tensors``, ``one real batch``
    notes: tuple[str, ...] = ()

    @property
    def flops_per_record(self) -> float | None:
        """The model's FLOPs per record on a rank, of the first dry run; None without one."""
        run = next(iter(self.runs.values()), None)
        return None if run is None else run.flops.model.at(_COUNTED_AT) / _COUNTED_AT

    def to_json(self) -> dict[str, Any]:
        return {
            "runs": {key: run.to_json() for key, run in self.runs.items()},
            "failures": dict(self.failures),
            "machine": None if self.machine is None else self.machine.to_json(),
            "capacity_bytes": self.capacity_bytes,
            "is_cpu": self.is_cpu,
            "described_by": self.described_by,
            "notes": list(self.notes),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> PredictInputs:
        machine = value["machine"]
        return cls(
            runs={key: DryRunResult.from_json(run) for key, run in value["runs"].items()},
            failures=dict(value["failures"]),
            machine=None if machine is None else Machine.from_json(machine),
            capacity_bytes=value["capacity_bytes"],
            is_cpu=bool(value["is_cpu"]),
            described_by=str(value["described_by"]),
            notes=tuple(value["notes"]),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class ModelInfo:
    """Model and device, according to the first measurement."""

    num_params: float
    num_trainable_params: float
    activation_bytes: float | None  # kept for backward per record of one micro batch
    device_bytes: float | None  # None where the device is the CPU

    @classmethod
    def from_measured(cls, measured: Measured) -> ModelInfo | None:
        """Read it from a measurement; None without parameters."""
        params = measured.value("num_params")
        if params is None:
            return None
        trainable = measured.value("num_trainable_params")
        return cls(
            params,
            params if trainable is None else trainable,
            measured.value("activation_bytes_per_record"),
            measured.value("device_memory_bytes"),
        )


def state_bytes(info: ModelInfo, stage: int, num_replicas: int, bytes_per_value: int) -> float:
    """Return the bytes of parameters, gradients and optimizer state on one device.

    In half precision Adam keeps 12 bytes per parameter (master weight and two moments), else 8.

    Source: Rajbhandari et al. 2020 (ZeRO), section 3.1.
    """
    optimizer = info.num_trainable_params * (12 if bytes_per_value == 2 else 8)
    gradients = info.num_trainable_params * bytes_per_value
    params = info.num_params * bytes_per_value
    if stage >= 1:
        optimizer /= num_replicas
    if stage >= 2:
        gradients /= num_replicas
    if stage >= 3:
        params /= num_replicas
    return params + gradients + optimizer


def largest_micro_batch(info: ModelInfo, stage: int, num_replicas: int, bytes_per_value: int) -> int | None:
    """Return the largest micro batch that may fit, at least 1; None if unknown."""
    if info.device_bytes is None or not info.activation_bytes:
        return None
    free = info.device_bytes - state_bytes(info, stage, num_replicas, bytes_per_value)
    return max(int(free // info.activation_bytes), 1)


def log_lines(info: ModelInfo, stages: tuple[int, ...], num_replicas: int, bytes_per_value: int) -> list[str]:
    """Return the lines that the guide shows after the first measurement."""
    memory = {stage: _mib(state_bytes(info, stage, num_replicas, bytes_per_value)) for stage in stages}
    lines = [
        f"Model size: {info.num_params:,.0f} parameters, {info.num_trainable_params:,.0f} of them trainable",
        f"Approx. GPU memory per stage: {memory}",
    ]
    if info.device_bytes is not None:
        lines.append(f"Total GPU memory: {_mib(info.device_bytes)}")
    if info.activation_bytes is not None:
        lines.append(f"Approx. activation memory per example: {_mib(info.activation_bytes)}")
    ceilings = {stage: largest_micro_batch(info, stage, num_replicas, bytes_per_value) for stage in stages}
    if all(ceiling is not None for ceiling in ceilings.values()):
        lines.append(f"Approx. max mbs per stage: {ceilings}")
    return lines


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:.4g} MiB"
