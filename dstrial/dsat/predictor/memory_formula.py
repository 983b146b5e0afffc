"""A first guess at memory from the guide's formula. Pure.

Bytes of a model's state per ZeRO stage, and the largest micro batch.

It knows nothing of buckets, offload or peaks; a search starts with it and does not believe it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from dstrial.dsat.core.outcome import Measured


@dataclasses.dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the first measurement tells about the model and the device.

    Attributes:
        num_params: parameters of the whole model.
        num_trainable_params: those that are trained.
        activation_bytes: kept for backward per record of one micro batch; None if unknown.
        device_bytes: memory of one device; None where there is no device but the CPU.
    """

    num_params: float
    num_trainable_params: float
    activation_bytes: float | None
    device_bytes: float | None

    @classmethod
    def from_measured(cls, measured: Measured) -> ModelInfo | None:
        """Read it from a measurement; None if that does not tell."""
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

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return dataclasses.asdict(self)


def state_bytes(info: ModelInfo, stage: int, num_replicas: int, bytes_per_value: int) -> float:
    """Return the bytes of parameters, gradients and optimizer state on one device.

    Args:
        info: the model.
        stage: ZeRO stage.
        num_replicas: ranks among which ZeRO divides.
        bytes_per_value: 2 in half precision, when Adam keeps 12 bytes per parameter (master weight and two
            moments), else 4 with 8 bytes.

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
    """Return what the guide shows after the first measurement, one line each."""
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
