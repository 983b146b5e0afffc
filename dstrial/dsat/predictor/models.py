"""Predict step times and memory peaks as distributions, learned from measurements.

Times and peaks are sums of parts of uncertain size (``features``), corrected by ``regression``. docs/explanation/dsat-model.md
has the equations.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from dstrial.dsat.predictor.features import MEMORY_PARTS, PARTS, PHASES, PeakParts, StepParts
from dstrial.dsat.predictor.regression import Effects, Regression, Row, Sample

# ---- time ------------------------------------------------------------------------------------

_STEP_FACTORS: dict[str, tuple[float, float]] = {
    "compute": (1.35, 0.3),
    "unfilled": (1.0, 0.7),
    "overhead": (0.6, 0.6),
    "transfer": (1.0, 0.6),
    "reduce": (1.0, 0.8),
    "calls": (1.0, 0.7),
    "unhidden": (1.0, 0.9),
    "gradient_copies": (1.0, 0.6),
    "optimizer": (1.35, 0.5),
    "host_optimizer": (1.2, 0.5),
    "host_copies": (1.35, 0.6),
    "pressure": (0.12, 0.7),
}
"""Part of a step -> (mean, relative standard deviation) of its factor before anything was measured; assumed. Models reach about
two thirds of the speed of large matrix products; optimizers read their state more than once."""
# Relative standard deviations of effects on time; docs/explanation/dsat-model.md lists them.
_GROUP, _GROUP_SLOPE, _STAGE, _PHASE = 0.09, 0.04, 0.01, 0.05  # slope: for each factor 8 of the micro batch
_KNOB, _SWITCH, _STRUCTURE, _MICRO = 0.004, 0.02, 0.004, 0.01  # structure: settings without batch sizes
_TREND, _USUAL_SIZE = 0.008, 1e8  # trend: for each factor 10 of a bucket's elements
_UNKNOWN_SETTING = 0.06
_PHASE_NOISE = 0.001  # share of the whole step, because the device is synchronised at the edges of a phase


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """What the time model and the memory model need to know about a configuration."""

    parts: StepParts
    peaks: tuple[PeakParts, ...]  # of phases in the dry run, the highest first; empty if unknown
    group: tuple[Any, ...]  # begins with the ZeRO stage; predictions in a group have a common error
    knobs: tuple[tuple[str, Any], ...]  # (name, value) of other ZeRO settings
    micro_batch_size: int
    extras: tuple[tuple[str, Any], ...] = ()  # (path, value) of settings of unknown effect
    is_scattered: bool = False  # gradients are not in a contiguous buffer

    def time_row(self, phase: str | None = None) -> Row:
        """Return the regression's input for the time of ``phase``; None: the whole step."""
        effects = (
            (f"micro {self.micro_batch_size}", _MICRO),
            (f"slope {self.group}", _GROUP_SLOPE * math.log2(self.micro_batch_size) / 3),
            *_structure_effects(self.group, self.knobs, self.extras),
        )
        if phase is None:
            return Row(self.parts.seconds, effects)
        own = (f"phase {phase} {self.group}", _PHASE)
        return Row(self.parts.phases[PHASES.index(phase)], (*effects, own))

    def memory_row(self, peak: PeakParts) -> Row:
        """Return the regression's input for the memory peak of one phase."""
        effects: list[tuple[Hashable, float]] = [
            (f"phase {peak.phase} {self.group}", _MEMORY_PHASE),
            (f"slope {self.group}", _MEMORY_SLOPE * math.log2(self.micro_batch_size) / 3),
            (f"group {self.group}", _MEMORY_GROUP),
            (f"structure {self.group} {self.knobs} {self.extras}", _MEMORY_STRUCTURE),
            *((f"setting {path} {value!r}", _MEMORY_UNKNOWN_SETTING) for path, value in self.extras),
            *([("scattered", _SCATTERED)] if self.is_scattered else []),
        ]
        return Row(peak.num_bytes, tuple(effects))

    @property
    def total_bytes(self) -> float:
        """Bytes of the highest peak in the dry run; 0 without a dry run."""
        return self.peaks[0].total_bytes if self.peaks else 0.0

    def peak_in(self, phases: Sequence[str]) -> PeakParts | None:
        """Return the highest memory peak in these phases; None if the dry run has none."""
        return next((one for one in self.peaks if one.phase in phases), None)


@functools.lru_cache(maxsize=65_536)
def _structure_effects(
    group: tuple[Any, ...], knobs: tuple[tuple[str, Any], ...], extras: tuple[tuple[str, Any], ...]
) -> Effects:
    """Return those effects on time that do not depend on the micro batch.

    An effect is an error that similar configurations share (``regression.Effects``).
    """
    effects: list[tuple[Hashable, float]] = [
        (f"stage {group[0]}", _STAGE),
        (f"group {group}", _GROUP),
        (f"structure {group} {knobs} {extras}", _STRUCTURE),
        *(
            (f"knob {name} {value!r} {group[0]}", _SWITCH if isinstance(value, bool) else _KNOB)
            for name, value in knobs
        ),
        *(
            (f"trend {name} {group[0]}", _TREND * math.log10(max(value, 1.0) / _USUAL_SIZE))
            for name, value in knobs
            if name.endswith("_elements")
        ),
        *((f"setting {path} {value!r}", _UNKNOWN_SETTING) for path, value in extras),
    ]
    return tuple(effects)


@dataclasses.dataclass(frozen=True, slots=True)
class TimePrediction:
    """The log-normal distribution of the time of a step or phase."""

    median_s: float
    log_std: float

    def quantile(self, num_stds: float) -> float:
        """Return the seconds at ``num_stds`` standard deviations above the median."""
        return self.median_s * math.exp(num_stds * self.log_std)


@dataclasses.dataclass(frozen=True, slots=True)
class Timing:
    """A measurement: seconds of a step, and of those phases that were timed."""

    point: Point
    seconds: float
    noise: float  # relative standard deviation
    phases: Mapping[str, float] = dataclasses.field(default_factory=dict)  # phase -> measured seconds


class StepModel:
    """Predicts the step times of configurations from measured step times.

    ``is_scaled``: the machine's speed was not measured, so that all predictions may be wrong by a common factor.
    """

    def __init__(self, timings: Sequence[Timing] = (), *, is_scaled: bool = False) -> None:
        samples = [Sample(one.point.time_row(), one.seconds, one.noise) for one in timings]
        samples += [
            Sample(
                one.point.time_row(phase),
                seconds,
                math.hypot(one.noise, _PHASE_NOISE * one.seconds / seconds),
            )
            for one in timings
            for phase, seconds in one.phases.items()
            if phase in PHASES and seconds > 0
        ]
        self._regression = Regression([_STEP_FACTORS[part] for part in PARTS], samples, is_scaled=is_scaled)

    def predict(self, points: Sequence[Point], phase: str | None = None) -> list[TimePrediction]:
        """Return the predicted time of each point's ``phase``; None: of the whole step."""
        medians, deviations = self._regression.predict([point.time_row(phase) for point in points])
        return [
            TimePrediction(float(median), float(deviation))
            for median, deviation in zip(medians, deviations, strict=True)
        ]


# ---- memory ----------------------------------------------------------------------------------

_MEMORY_FACTORS = {
    "state": (1.0, 0.03),
    "others": (1.0, 0.4),
    "others_divided": (1.0, 0.4),
    "others_offloading": (0.8, 0.6),
    "kept": (1.0, 0.12),
    "grown": (1.0, 0.12),
    "buckets": (1.0, 0.2),
    "overlapped": (1.35, 0.45),
    "held": (0.75, 0.6),
}
"""Part of a memory peak -> (mean, relative standard deviation) of its factor before anything was measured; assumed."""
# Relative standard deviations of effects on memory, and of a measurement's noise.
_MEMORY_GROUP, _MEMORY_STRUCTURE, _MEMORY_PHASE = 0.03, 0.01, 0.03
_MEMORY_UNKNOWN_SETTING, _MEMORY_SLOPE = 0.1, 0.015
_MEMORY_NOISE = 0.004
_SCATTERED = 0.03  # share of memory that gradients outside a contiguous buffer leave unusable between them
_WASTE_NOISE, _MAX_WASTE, _BEYOND = 0.01, 0.1, 0.5
"""Waste is log(bytes that the allocator holds / bytes of tensors). Of waste above ``_MAX_WASTE`` only half counts, because the
allocator could free the other half."""
_NEAR = 0.85  # a peak above this share of the lowest failed peak is expected to fail, unless a larger one ran
_MEASURED_PHASES = {"forward": ("forward", "gather"), "backward": ("backward", "reduce"), "step": ("step",)}
"""Phase of a measurement -> phases of a dry run within it."""


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Assumptions about the memory of a device before any measurement."""

    capacity_bytes: float | None  # memory of the device; None if unknown
    context_bytes: float = 0.0  # taken by driver and libraries before any tensor
    context_std_bytes: float = 0.0  # standard deviation of ``context_bytes``
    waste: float = 0.0  # mean of log(bytes that the allocator holds / bytes of tensors)
    log_std: float = 0.02  # standard deviation of the waste

    @classmethod
    def cpu(cls, capacity_bytes: float | None = None) -> DeviceMemory:
        """Return the assumed memory of a CPU, which wastes little between tensors."""
        return cls(capacity_bytes, waste=0.005, log_std=0.03)

    @classmethod
    def cuda(cls, capacity_bytes: float) -> DeviceMemory:
        """Return the assumed memory of a GPU with torch's caching allocator.

        Assumed, not measured: the allocator leaves some percent of its segments unused, because it splits them into blocks of
        512 bytes; the CUDA context with NCCL takes about one GiB.
        """
        return cls(capacity_bytes, 1.0 * 2**30, 0.3 * 2**30, waste=0.04, log_std=0.04)


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryPrediction:
    """The log-normal distribution of the peak memory on one device."""

    median_bytes: float
    log_std: float

    def quantile(self, probability: float) -> float:
        """Return the bytes that suffice with this probability."""
        return self.median_bytes * math.exp(statistics.NormalDist().inv_cdf(probability) * self.log_std)

    def probability_to_fit(self, capacity_bytes: float) -> float:
        """Return the probability that ``capacity_bytes`` suffice."""
        if capacity_bytes <= 0:
            return 0.0
        if self.median_bytes <= 0 or self.log_std <= 0:
            return float(self.median_bytes <= capacity_bytes)
        return statistics.NormalDist().cdf(math.log(capacity_bytes / self.median_bytes) / self.log_std)


class MemoryModel:
    """Predicts memory peaks from measured peaks and out-of-memory errors."""

    def __init__(self, device: DeviceMemory) -> None:
        self.device = device
        self._samples: list[Sample] = []
        self._errors: list[Row] = []
        # group -> bytes according to the dry run: the fewest that ran out of memory, and the most that ran
        self._failed_bytes: dict[tuple[Any, ...], float] = {}
        self._run_bytes: dict[tuple[Any, ...], float] = {}
        self._wastes: list[float] = []
        self._regression: Regression | None = None

    def measured(self, point: Point, phases: Mapping[str, float], reserved_bytes: float | None) -> None:
        """Learn from a measurement.

        ``phases`` are peak bytes of tensors: phase -> bytes, and ``all`` -> bytes of the whole step. ``reserved_bytes`` is the
        largest number of bytes that the allocator held; None if it was not measured.
        """
        self._run_bytes[point.group] = max(self._run_bytes.get(point.group, 0.0), point.total_bytes)
        whole = phases.get("all") or max(phases.values(), default=0.0)
        known = [
            (peak, phases[name])
            for name, where in _MEASURED_PHASES.items()
            if phases.get(name) and (peak := point.peak_in(where)) is not None
        ]
        if not known and whole and point.peaks:
            known = [(point.peaks[0], whole)]
        self._samples += [Sample(point.memory_row(peak), value, _MEMORY_NOISE) for peak, value in known]
        if whole and reserved_bytes and reserved_bytes >= whole:
            waste = math.log(reserved_bytes / whole) - _SCATTERED * point.is_scattered
            self._wastes.append(min(waste, _MAX_WASTE) + _BEYOND * max(waste - _MAX_WASTE, 0.0))
        self._regression = None

    def ran_out(self, point: Point, phase: str) -> None:
        """Learn from an out-of-memory error in ``phase``, which is empty if unknown."""
        peak = point.peak_in((*_MEASURED_PHASES.get(phase, ()), phase)) or point.peaks[0]
        self._errors.append(point.memory_row(peak))
        self._failed_bytes[point.group] = min(
            self._failed_bytes.get(point.group, math.inf), point.total_bytes
        )
        self._regression = None

    def predict(self, points: Sequence[Point]) -> list[MemoryPrediction | None]:
        """Return the predicted memory peak of each point; None without a dry run.

        The peak is that of the phase that is least likely to fit.
        """
        mean, waste_std = self._waste()
        peaks = [(point, peak) for point in points for peak in point.peaks]
        medians, deviations = self._fitted().predict([point.memory_row(peak) for point, peak in peaks])
        worst: dict[int, MemoryPrediction] = {}
        for median, deviation, (point, _) in zip(medians, deviations, peaks, strict=True):
            body = float(median) * math.exp(mean + _SCATTERED * point.is_scattered)
            whole = body + self.device.context_bytes
            spread = math.hypot(math.hypot(float(deviation), waste_std) * body, self.device.context_std_bytes)
            known = worst.get(id(point))
            if known is None or whole + 2 * spread > known.median_bytes * (1 + 2 * known.log_std):
                worst[id(point)] = MemoryPrediction(whole, spread / whole if whole else 0.0)
        return [self._raised(point, worst.get(id(point))) for point in points]

    def _raised(self, point: Point, found: MemoryPrediction | None) -> MemoryPrediction | None:
        """Return ``found``; raise it above the device's memory if it will likely run out.

        Memory likely runs out if a configuration of the same group ran out with a similar or smaller peak in the dry run. If
        one of the group has run with at least this peak, ``found`` is returned unchanged.
        """
        least = _NEAR * self._failed_bytes.get(point.group, math.inf)
        if found is None or point.total_bytes < max(least, self._run_bytes.get(point.group, 0.0) + 1):
            return found
        median_bytes = max(found.median_bytes, 1.01 * (self.device.capacity_bytes or 0.0))
        return MemoryPrediction(median_bytes, found.log_std)

    def _fitted(self) -> Regression:
        if self._regression is None:
            capacity = self.device.capacity_bytes or 0.0
            least = max(capacity - self.device.context_bytes, 1.0) / math.exp(self._waste()[0])
            errors = [Sample(row, least * 1.02, _MEMORY_NOISE, is_least=True) for row in self._errors]
            factors = [_MEMORY_FACTORS[part] for part in MEMORY_PARTS]
            self._regression = Regression(factors, [*self._samples, *errors], is_robust=False)
        return self._regression

    def _waste(self) -> tuple[float, float]:
        """Return (mean, standard deviation) of log(allocator's bytes / bytes of tensors)."""
        prior, own = 1 / max(self.device.log_std, 1e-6) ** 2, 1 / _WASTE_NOISE**2
        weight = prior + own * len(self._wastes)
        return (self.device.waste * prior + own * sum(self._wastes)) / weight, math.sqrt(1 / weight)
