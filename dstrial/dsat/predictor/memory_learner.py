"""Learn distributions of peak memory from peaks and out-of-memory errors. Pure.

The dry run says which bytes of tensors are alive in each phase. Measured peaks, phase by phase where they are told so, correct
their parts; what the allocator holds beyond tensors, and what the driver takes, come on top.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from dstrial.dsat.predictor.additive_regression import AdditiveRegression, Effects, Row, Sample
from dstrial.dsat.predictor.memory import MEMORY_PARTS, DeviceMemory, MemoryPrediction, PeakParts

_FACTORS = {
    "state": (0.0, 0.03),
    "others": (0.0, 0.4),
    "others_divided": (0.0, 0.4),
    "others_offloading": (-0.2, 0.7),
    "kept": (0.0, 0.12),
    "grown": (0.0, 0.12),
    "buckets": (0.0, 0.2),
    "overlapped": (0.3, 0.45),
    "held": (-0.3, 0.6),
}
"""Mean and standard deviation of the logarithm of each part's factor, before anything was measured. Assumed."""
_FORMULA_ACTIVATIONS = (0.05, 0.35)
"""The same where activations were not dry-run."""
_GROUP, _STRUCTURE, _SETTING, _PHASE, _FORMULA, _UNKNOWN_SETTING = 0.03, 0.01, 0.003, 0.03, 0.06, 0.1
_SLOPE = 0.015
_NOISE, _LEAST_SPREAD = 0.004, 0.01
_SCATTERED, _SCATTERED_SPREAD = 0.03, 0.02
"""What gradients that are not contiguous leave unusable between them."""
_NEAR = 0.85
"""What needs this share of what ran out of memory may do so, too, unless more of its group has run."""
_WASTE_NOISE, _MOST_WASTE, _BEYOND = 0.01, 0.1, 0.5
"""Beyond ``_MOST_WASTE`` of what is needed, half of what the allocator holds could be given back."""


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryPoint:
    """A configuration whose memory is measured or wanted."""

    peaks: tuple[PeakParts, ...]  # of its phases, the greatest first, as dry-run
    group: tuple[Any, ...]  # stage, offload, extras: configurations of a group share errors
    settings: tuple[tuple[str, Any], ...]
    extras: tuple[tuple[str, Any], ...] = ()
    is_formula: bool = False  # a formula stands for the dry run
    is_scattered: bool = False  # gradients are not contiguous
    micro_batch_size: int = 1

    def row(self, peak: PeakParts) -> Row:
        """Return one phase for the additive regression."""
        effects = (
            (f"phase {peak.phase} {self.group}", _PHASE),
            (f"slope {self.group}", _SLOPE * math.log2(self.micro_batch_size) / 3),
            *_structure_effects(self.group, self.settings, self.extras, self.is_formula, self.is_scattered),
        )
        return Row(peak.num_bytes, effects)

    def peak_in(self, phases: Sequence[str]) -> PeakParts | None:
        """Return the greatest peak of some phases; None without."""
        return next((one for one in self.peaks if one.phase in phases), None)


@functools.lru_cache(maxsize=65_536)
def _structure_effects(
    group: tuple[Any, ...],
    settings: tuple[tuple[str, Any], ...],
    extras: tuple[tuple[str, Any], ...],
    is_formula: bool,
    is_scattered: bool,
) -> Effects:
    """Return the effects that a structure's micro batches share, as cached strings."""
    effects: list[tuple[Hashable, float]] = [
        (f"group {group}", _GROUP),
        (f"structure {group} {settings} {extras}", _STRUCTURE),
        *((f"setting {path} {value!r}", _SETTING) for path, value in settings),
        *((f"setting {path} {value!r}", _UNKNOWN_SETTING) for path, value in extras),
    ]
    if is_formula:
        effects.append((f"formula {group[0]}", _FORMULA))
    if is_scattered:
        effects.append(("scattered", _SCATTERED_SPREAD))
    return tuple(effects)


_TOLD = {"forward": ("forward", "gather"), "backward": ("backward", "reduce"), "step": ("step",)}
"""Phases that a measurement tells apart, and those of a dry run that lie in them."""


class MemoryLearner:
    """Learns and predicts peaks; equal evidence in equal order gives equal results."""

    def __init__(self, device: DeviceMemory, *, is_formula: bool = False) -> None:
        self.device = device
        factors = _FACTORS | (dict.fromkeys(("kept", "grown"), _FORMULA_ACTIVATIONS) if is_formula else {})
        self._factors = [factors[part] for part in MEMORY_PARTS]
        self._seen: list[Sample] = []
        self._errors: list[tuple[Row, float]] = []
        self._failed: dict[tuple[Any, ...], tuple[float, float]] = {}
        self._ran: dict[tuple[Any, ...], float] = {}
        self._wastes: list[float] = []
        self._sums: AdditiveRegression | None = None

    def measured(self, point: MemoryPoint, phases: Mapping[str, float], reserved_bytes: float | None) -> None:
        """Take measured peaks of tensors, by phase and of ``all``.

        ``reserved_bytes`` is the most that the allocator held.
        """
        whole = phases.get("all") or max(phases.values(), default=0.0)
        if point.peaks:
            self._ran[point.group] = max(self._ran.get(point.group, 0.0), point.peaks[0].total_bytes)
        rest = math.exp(-_SCATTERED) if point.is_scattered else 1.0
        told = [
            (peak, phases[name])
            for name, where in _TOLD.items()
            if phases.get(name) and (peak := point.peak_in(where)) is not None
        ]
        if not told and whole and point.peaks:
            told = [(point.peaks[0], whole)]
        self._seen += [Sample(point.row(peak), value * rest, _NOISE) for peak, value in told]
        if whole and reserved_bytes and reserved_bytes >= whole:
            waste = math.log(reserved_bytes / whole)
            self._wastes.append(min(waste, _MOST_WASTE) + _BEYOND * max(waste - _MOST_WASTE, 0.0))
        self._sums = None

    def ran_out(self, point: MemoryPoint, phase: str, capacity_bytes: float) -> None:
        """Take an out-of-memory error in a measured, dry-run or unknown phase."""
        peak = point.peak_in((*_TOLD.get(phase, ()), phase)) or (point.peaks[0] if point.peaks else None)
        if peak is not None:
            self._errors.append((point.row(peak), capacity_bytes))
            total = point.peaks[0].total_bytes
            failed, _ = self._failed.get(point.group, (math.inf, 0.0))
            self._failed[point.group] = min(failed, total), capacity_bytes
        self._sums = None

    def predict(self, point: MemoryPoint) -> MemoryPrediction | None:
        """Return the phase that is least likely to fit; None if nothing is known of it."""
        if not point.peaks:
            return None
        medians, log_stds = self._model().predict([point.row(peak) for peak in point.peaks])
        waste, waste_log_std = self._waste()
        if point.is_scattered:
            waste += _SCATTERED
        context = self.device.context_bytes
        found: list[tuple[float, float, str]] = []
        for median, log_std, peak in zip(np.exp(medians + waste), log_stds, point.peaks, strict=True):
            body = float(median)
            whole = body + context
            absolute = math.hypot(
                math.hypot(float(log_std), waste_log_std) * body, self.device.context_std_bytes
            )
            found.append((whole, max(absolute / whole, _LEAST_SPREAD) if whole else 0.0, peak.phase))
        whole, log_std, phase = max(found, key=lambda one: one[0] * math.exp(2 * one[1]))
        failed, capacity = self._failed.get(point.group, (math.inf, 0.0))
        if point.peaks[0].total_bytes >= max(_NEAR * failed, self._ran.get(point.group, 0.0)):
            # A configuration of this group with about this much memory ran out, and no larger one has run.
            whole = max(whole, 1.01 * capacity)
        return MemoryPrediction(
            median_bytes=whole,
            log_std=log_std,
            phase=phase,
            phase_bytes=tuple((peak.phase, peak.total_bytes) for peak in point.peaks),
        )

    # ---- machinery -------------------------------------------------------------------------------

    def _model(self) -> AdditiveRegression:
        if self._sums is None:
            waste, _ = self._waste()
            least = [
                Sample(
                    row,
                    max(capacity - self.device.context_bytes, 1.0) / math.exp(waste),
                    3 * _NOISE,
                    is_least=True,
                )
                for row, capacity in self._errors
            ]
            self._sums = AdditiveRegression(self._factors, [*self._seen, *least], is_robust=False)
        return self._sums

    def _waste(self) -> tuple[float, float]:
        """Return mean and spread of the log of allocator bytes over tensor bytes."""
        prior = 1 / max(self.device.log_std, 1e-6) ** 2
        own = 1 / _WASTE_NOISE**2
        weight = prior + own * len(self._wastes)
        mean = (self.device.waste * prior + own * sum(self._wastes)) / weight
        return mean, math.sqrt(1 / weight)
