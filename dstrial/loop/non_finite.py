"""Detect training without progress: NaN losses or weights, no optimizer steps.

At a report all ranks have the same losses and step counts, so that they decide equally without communication.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from dstrial.engine.deepspeed_internals import optimizers
from dstrial.errors import NonFiniteError

logger = logging.getLogger("dstrial.loop")

# Fixes in messages: for values that are not finite, and for missing optimizer steps.
_LOWER = "Lower the learning rate, look at the records of that batch"
_STEP = "Call engine.step() after every engine.backward() in train_batch"


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


@dataclasses.dataclass(slots=True)
class _Streak:
    """Consecutive bad reports: their number, and their first batch, counted from 1."""

    length: int = 0
    since: int = 0
    has_warned: bool = False


class NonFiniteGuard:
    """Raises an error or warns after ``patience`` consecutive bad reports.

    A report is bad if no loss is finite on any rank. A report is also bad if no engine took an optimizer step, or if an engine
    skipped all of its steps. Skipped steps are good while dynamic loss scaling reduces a loss scale.

    Args:
        mode: ``fail`` raises an error, ``warn`` logs a warning, ``ignore`` does nothing.
        patience: number of consecutive bad reports that cause the error or the warning.
        counts: step counts of every engine before the first batch of this process.
        is_resumed: whether the run was resumed; then earlier losses and steps count as good.
    """

    def __init__(
        self,
        mode: Literal["fail", "warn", "ignore"],
        patience: int,
        *,
        is_chief: bool,
        counts: Sequence[StepCounts],
        is_resumed: bool,
    ) -> None:
        self._mode = mode
        self._patience = patience
        self._is_chief = is_chief
        self._counts = tuple(counts)
        self._losses = _Streak()
        self._steps = _Streak()
        self._had_good = {"loss": is_resumed, "step": is_resumed}

    def judge(
        self,
        finite: Sequence[Mapping[str, bool]],
        averages: Mapping[str, Any],
        counts: Sequence[StepCounts],
        start: int,
        *,
        is_last: bool,
    ) -> None:
        """Check one report. Ranks: all, with the same arguments; no communication.

        Args:
            finite: for each rank that reports metrics: loss name -> whether the loss is finite.
            averages: metric name -> reported value.
            counts: step counts of every engine; empty if unknown.
            start: finished batches at the previous report.
            is_last: whether this is the run's last report. Then a run without any good report fails even below ``patience``,
                and a run whose last reports are bad gets a warning.

        Raises:
            NonFiniteError: ``mode`` is ``fail``, and the run fails; raised on all ranks.
        """
        losses = {name: has_finite for of_rank in finite for name, has_finite in of_rank.items()}
        is_good = not losses or any(any(of_rank.values()) for of_rank in finite)
        self._losses = self._continued(self._losses, "loss", start, is_good=is_good)
        if counts:
            is_good = self._steps_are_good(counts)
            self._counts = tuple(counts)
            self._steps = self._continued(self._steps, "step", start, is_good=is_good)
        name = "loss" if "loss" in losses or not losses else next(iter(losses))
        what = f"no finite loss ({name} is {averages.get(name)!r})"
        self._act(self._losses, what, _LOWER, is_last=is_last, has_good=self._had_good["loss"])
        skipped, steps = sum(one.num_skipped for one in counts), sum(one.num_steps for one in counts)
        what, fix = "no optimizer step (engine.step() ends no accumulation)", _STEP
        if skipped:
            what = f"no optimizer step ({skipped} of {steps} were skipped, as gradients were not finite)"
            fix = _LOWER
        self._act(self._steps, what, fix, is_last=is_last, has_good=self._had_good["step"])

    def _continued(self, streak: _Streak, kind: str, start: int, *, is_good: bool) -> _Streak:
        if is_good:
            self._had_good[kind] = True
            return _Streak()
        since = streak.since or start + 1
        return _Streak(streak.length + 1, since, streak.has_warned)

    def _steps_are_good(self, counts: Sequence[StepCounts]) -> bool:
        pairs = list(zip(self._counts, counts, strict=True))
        changes = [
            (now.num_steps - then.num_steps, now.num_skipped - then.num_skipped) for then, now in pairs
        ]
        has_step = any(num_steps > num_skipped for num_steps, num_skipped in changes)
        skips_all = any(num_steps and num_steps == num_skipped for num_steps, num_skipped in changes)
        # Dynamic loss scaling begins with too large a scale, and skips steps until the scale is low enough.
        is_scaling = any(now.loss_scale < then.loss_scale for then, now in pairs)
        return is_scaling or (has_step and not skips_all)

    def _act(self, streak: _Streak, what: str, fix: str, *, is_last: bool, has_good: bool) -> None:
        is_over = streak.length >= self._patience or (is_last and not has_good)
        if self._mode == "ignore" or not streak.length or not (is_over or is_last):
            return
        rows = "1 report" if streak.length == 1 else f"{streak.length} reports in a row"
        found = f"training has {what} since batch {streak.since}: {rows}"
        if self._mode == "fail" and is_over:
            raise NonFiniteError(
                f"{found}; expected at least one in every {self._patience} reports. {fix}, or set "
                "data.dstrial.non_finite to warn or ignore; the checkpoints before it are kept."
            )
        if self._is_chief and not streak.has_warned:
            logger.warning("%s", found)
        streak.has_warned = True


# ---- weights ------------------------------------------------------------------------------------------

_SMALLEST_ITEM_BYTES = 2
"""Types with fewer bytes are not checked: torch 2.13 cannot compute the minimum of 8-bit floating-point types."""


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


@dataclasses.dataclass(frozen=True, slots=True)
class StateEvidence:
    """Whether one rank's weights and newest losses are finite, before a checkpoint.

    Attributes:
        lost_weight: name of a weight of this rank that is not finite; None if all are finite.
        loss_is_finite: whether any loss's newest value is finite; None on a rank without losses.
    """

    lost_weight: str | None
    loss_is_finite: bool | None


def lost_weight(found: Sequence[StateEvidence]) -> str | None:
    """Return text on the first weight that is not finite, with its rank; or None."""
    for rank, evidence in enumerate(found):
        if evidence.lost_weight is not None:
            return f"the weights are not finite ({evidence.lost_weight} on rank {rank})"
    return None


def unsafe_to_save_reason(found: Sequence[StateEvidence]) -> str | None:
    """Return why a checkpoint of the state would be unsafe; None if it is safe."""
    known = [evidence.loss_is_finite for evidence in found if evidence.loss_is_finite is not None]
    return lost_weight(found) or ("no loss is finite" if known and not any(known) else None)
