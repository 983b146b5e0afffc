"""Step times from their parts, corrected by every measurement. Pure.

A measurement tells the time of the whole step, and often those of forward, backward and optimizer step, from which the parts are
known one by one. Micro batches of one structure share its factors, so that two or three of them give a curve.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from dstrial.dsat.predictor.additive_regression import AdditiveRegression, Effects, Row, Sample
from dstrial.dsat.predictor.step_parts import PARTS, PHASES, StepParts

_FACTORS: dict[str, tuple[float, float]] = {
    "compute": (0.3, 0.4),
    "unfilled": (0.0, 0.8),
    "overhead": (-0.5, 0.8),
    "transfer": (0.1, 0.5),
    "reduce": (0.0, 0.6),
    "calls": (0.0, 0.8),
    "unhidden": (0.0, 0.8),
    "gradient_copies": (0.0, 0.6),
    "optimizer": (0.3, 0.5),
    "host_optimizer": (0.2, 0.5),
    "host_copies": (0.3, 0.6),
}
"""Mean and standard deviation of the logarithm of each part's factor, before anything was measured: models reach about two
thirds of what large matrix products do, optimizers read their state more than once. Assumed."""

_GROUP, _GROUP_SLOPE, _STAGE = 0.045, 0.02, 0.01
_SETTING, _SETTING_ANYWHERE, _UNKNOWN_SETTING = 0.004, 0.002, 0.06
_STRUCTURE, _MICRO, _PHASE = 0.004, 0.014, 0.05
"""Standard deviations of what the parts know nothing of."""
_PHASE_NOISE = 0.02
"""Of a phase's time over that of the step: it is measured with the device synchronised at its edges."""


@dataclasses.dataclass(frozen=True, slots=True)
class TimePoint:
    """A configuration whose time is measured or wanted."""

    parts: StepParts  # as predicted
    group: tuple[Any, ...]  # the stage first; configurations of a group share errors
    settings: tuple[tuple[str, Any], ...]
    micro_batch_size: int
    extras: tuple[tuple[str, Any], ...] = ()  # settings about which no rule is known

    def row(self) -> Row:
        """Return the whole step for the additive regression."""
        return Row(self.parts.seconds, self._effects())

    def phase_row(self, phase: str) -> Row:
        """Return one phase for the additive regression."""
        own = (f"phase {phase} {self.group}", _PHASE)
        return Row(self.parts.phases[PHASES.index(phase)], (*self._effects(), own))

    def _effects(self) -> Effects:
        return (
            *_size_effects(self.group, self.micro_batch_size),
            *_structure_effects(self.group, self.settings, self.extras),
        )


@functools.lru_cache(maxsize=65_536)
def _size_effects(group: tuple[Any, ...], size: int) -> Effects:
    return (f"micro {size}", _MICRO), (f"slope {group}", _GROUP_SLOPE * math.log2(size) / 3)


@functools.lru_cache(maxsize=65_536)
def _structure_effects(
    group: tuple[Any, ...], settings: tuple[tuple[str, Any], ...], extras: tuple[tuple[str, Any], ...]
) -> Effects:
    """Return the effects that a structure's micro batches share, as cached strings."""
    effects: list[tuple[Hashable, float]] = [
        (f"stage {group[0]}", _STAGE),
        (f"group {group}", _GROUP),
        (f"structure {group} {settings} {extras}", _STRUCTURE),
    ]
    for path, value in settings:
        effects.append((f"setting {path} {value!r}", _SETTING_ANYWHERE))
        effects.append((f"setting {path} {value!r} {group[0]}", _SETTING))
    effects += [(f"setting {path} {value!r}", _UNKNOWN_SETTING) for path, value in extras]
    return tuple(effects)


@dataclasses.dataclass(frozen=True, slots=True)
class TimePrediction:
    """A step's time as a distribution."""

    median_s: float
    log_std: float

    def quantile(self, num_stds: float) -> float:
        """Return the time that lies so many standard deviations above the median, seconds."""
        return self.median_s * math.exp(num_stds * self.log_std)


@dataclasses.dataclass(frozen=True, slots=True)
class Timing:
    """A measured step."""

    point: TimePoint
    seconds: float
    log_std: float
    # seconds, as far as they were told apart
    phases: Mapping[str, float] = dataclasses.field(default_factory=dict)


class TimeModel:
    """Predicts step times from measured ones, in any order."""

    def __init__(self, timings: Sequence[Timing] = ()) -> None:
        seen = [Sample(one.point.row(), one.seconds, one.log_std) for one in timings]
        for one in timings:
            seen += [
                Sample(one.point.phase_row(phase), seconds, math.hypot(one.log_std, _PHASE_NOISE))
                for phase, seconds in one.phases.items()
                if phase in PHASES and seconds > 0
            ]
        self._sums = AdditiveRegression([_FACTORS[part] for part in PARTS], seen)

    @property
    def scale(self) -> float:
        """The factor by which effects differ from their priors."""
        return self._sums.scale

    def predict(self, points: Sequence[TimePoint], phase: str | None = None) -> list[TimePrediction]:
        rows = [point.row() if phase is None else point.phase_row(phase) for point in points]
        medians, log_stds = self._sums.predict(rows)
        return [
            TimePrediction(float(median), float(log_std))
            for median, log_std in zip(np.exp(medians), log_stds, strict=True)
        ]

    def parts(self, point: TimePoint, phase: str | None = None) -> dict[str, float]:
        """Return part -> seconds of a step or phase; they sum to its predicted time."""
        seconds = point.parts.seconds if phase is None else point.parts.phases[PHASES.index(phase)]
        corrected = np.array(self._sums.factors()) * np.array(seconds)
        total = float(corrected.sum())
        (prediction,) = self.predict([point], phase)
        rescale = prediction.median_s / total if total else 0.0
        return {part: float(value) * rescale for part, value in zip(PARTS, corrected, strict=True)}

    def factors(self) -> Mapping[str, float]:
        return dict(zip(PARTS, self._sums.factors(), strict=True))
