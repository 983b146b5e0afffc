"""Check this rank's weights for NaN and infinity; read an engine's step counters."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch

from dstrial.engine.deepspeed_internals import optimizers

_SMALLEST_ITEM_BYTES = 2
"""Types with fewer bytes are not checked: torch 2.13 cannot compute the minimum of 8-bit floating-point types."""


@dataclasses.dataclass(frozen=True, slots=True)
class StepCounts:
    """An engine's number of optimizer steps, number of skipped steps, and loss scale.

    ``num_steps`` includes the skipped steps.
    """

    num_steps: int
    num_skipped: int
    loss_scale: float

    @classmethod
    def of(cls, engine: Any) -> StepCounts:
        """Read an engine's counters without synchronising with the device.

        Source: DeepSpeed 0.19.8 runtime/engine.py, ``_take_model_step``; ZeRO also skips steps with non-finite
        gradients in bfloat16 or float32 (``check_grad_overflow``).
        """
        scale = getattr(engine.optimizer, "loss_scale", None)
        is_number = isinstance(scale, (int, float)) and not isinstance(scale, bool)
        return cls(
            int(engine.global_steps), int(engine.skipped_steps), float(scale) if is_number and scale else 1.0
        )


class FiniteWeights:
    """Detects weights of this rank that become NaN or infinite during training.

    Weights that are not finite at construction (uninitialised memory) are ignored. Frozen weights and buffers are ignored too,
    because they may contain infinity on purpose (attention masks).
    """

    def __init__(self, engines: Sequence[Any]) -> None:
        self._engines = engines
        self._known = frozenset(self._not_finite())

    def lost(self) -> str | None:
        """Return the name of one weight that became NaN or infinite; None without one.

        Synchronises with the device.
        """
        return next((name for name in self._not_finite() if name not in self._known), None)

    def _not_finite(self) -> list[str]:
        found = []
        for engine_idx, engine in enumerate(self._engines):
            by_device: dict[torch.device, list[tuple[str, torch.Tensor]]] = {}
            for name, parameter in engine.module.named_parameters():
                weights = _local_values(parameter)
                if parameter.requires_grad and weights is not None:
                    by_device.setdefault(weights.device, []).append((name, weights))
            for named in by_device.values():
                # Minimum and maximum propagate NaN and infinity without a temporary copy: on a CPU thread 20 times as fast
                # as a norm or a copy (25 M float32: 8 ms against 151 and 159).
                ends = [torch.stack(torch.aminmax(weights)).float() for _, weights in named]
                prefix = f"engine {engine_idx}: " if len(self._engines) > 1 else ""
                for (name, _), (least, most) in zip(named, torch.stack(ends).tolist(), strict=True):
                    if not (math.isfinite(least) and math.isfinite(most)):
                        found.append(prefix + name)
        return found


def _local_values(parameter: Any) -> torch.Tensor | None:
    """Return this rank's part of a weight; None if absent, empty, integer or 8-bit."""
    weights = parameter.detach()
    if optimizers.is_cut(parameter):
        weights = optimizers.held_part(parameter)
        if weights is None:
            return None
    is_float = weights.is_floating_point() and weights.dtype.itemsize >= _SMALLEST_ITEM_BYTES
    return weights if is_float and weights.numel() and not weights.is_meta else None
