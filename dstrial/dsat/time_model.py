"""Step times from their parts, corrected by every measurement, with uncertainty. Pure.

The logarithm of a step's time is taken to be that of the sum of its parts, each times a factor of its own, plus effects of
what the parts know nothing of: the stage, each setting, the structure, and the micro batch in it. Factors and effects have
normal priors; measurements narrow them. Micro batches of one structure share its factors, so that two or three of them give a
curve.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dstrial.dsat.step_parts import PARTS, StepParts

_Floats = NDArray[np.float64]

_FACTORS: dict[str, tuple[float, float]] = {
    "compute": (0.45, 0.45),
    "unfilled": (-2.0, 1.2),
    "overhead": (0.0, 0.8),
    "transfer": (0.1, 0.5),
    "calls": (0.0, 0.8),
    "optimizer": (0.4, 0.6),
    "host_optimizer": (0.3, 0.6),
    "host_copies": (0.1, 0.5),
}
"""Mean and standard deviation of the logarithm of each part's factor, before anything was measured: models reach about two
thirds of what large matrix products do, optimizers read their state more than once. Assumed."""

_STAGE, _STAGE_SLOPE, _SETTING, _STRUCTURE, _SLOPE, _POINT = 0.06, 0.03, 0.02, 0.008, 0.006, 0.006
"""Standard deviations of what the parts know nothing of."""
_LEAST_NOISE = 0.004
_ROUNDS = 8
_SCALES = ((0.25, 0.05), (0.4, 0.15), (0.6, 0.25), (1.0, 0.35), (2.0, 0.15), (4.0, 0.05))
"""By how much all effects may differ from what is assumed of them, and how probable that is beforehand."""
_FEWEST_TO_SCALE = 8


@dataclasses.dataclass(frozen=True, slots=True)
class TimePoint:
    """A configuration whose time is measured or wanted.

    Attributes:
        parts: where its time goes, as predicted.
        stage: ZeRO stage.
        settings: what it sets, path -> value; equal settings have equal effects.
        micro_batch_size: records of a micro batch.
    """

    parts: StepParts
    stage: int
    settings: tuple[tuple[str, Any], ...]
    micro_batch_size: int


@dataclasses.dataclass(frozen=True, slots=True)
class TimePrediction:
    """A step's time as a distribution.

    Attributes:
        median_s: as probably more as less.
        spread: standard deviation of the logarithm.
    """

    median_s: float
    spread: float

    def quantile(self, num_spreads: float) -> float:
        """Return the time that lies so many spreads above the median, seconds."""
        return self.median_s * math.exp(num_spreads * self.spread)


@dataclasses.dataclass(frozen=True, slots=True)
class Timing:
    """A measured step.

    Attributes:
        point: what was measured.
        seconds: of one step.
        spread: standard deviation of its logarithm.
    """

    point: TimePoint
    seconds: float
    spread: float


class TimeModel:
    """Predicts step times from what is known so far.

    Args:
        timings: what was measured, in any order.

    Source: Bayesian linear regression around the most probable factors, in its kernel form (Rasmussen and Williams 2006,
    chapter 2), the effects' common scale by marginal likelihood.
    """

    def __init__(self, timings: Sequence[Timing] = ()) -> None:
        means, spreads = zip(*(_FACTORS[part] for part in PARTS), strict=True)
        self._prior: _Floats = np.array(means)
        self._variances: _Floats = np.array(spreads) ** 2
        self.log_factors: _Floats = self._prior.copy()
        self.scale = 1.0
        self._timings = tuple(timings)
        self._fitted: _Fitted | None = None
        if self._timings:
            self._fit()

    def predict(self, points: Sequence[TimePoint]) -> list[TimePrediction]:
        """Return the times of some configurations."""
        if not points:
            return []
        at = _Table(points)
        medians, shares = at.log_times(self.log_factors)
        variances = (shares**2 @ self._variances) + self.scale**2 * at.own_variance()
        if self._fitted is not None:
            across = self._covariance(shares, at, self._fitted.shares, self._fitted.table)
            residual = self.scale**2 * at.effects(self._fitted.table)
            medians = medians + residual @ self._fitted.weights
            solved = np.linalg.solve(self._fitted.total, across.T)
            variances = np.maximum(variances - np.sum(across * solved.T, axis=1), 0.0)
        return [
            TimePrediction(math.exp(median), math.sqrt(variance + _LEAST_NOISE**2))
            for median, variance in zip(medians, variances, strict=True)
        ]

    def parts(self, point: TimePoint) -> dict[str, float]:
        """Return part -> seconds of a configuration, so that they sum to its predicted time."""
        corrected = np.exp(self.log_factors) * np.array(point.parts.seconds)
        total = float(corrected.sum())
        (prediction,) = self.predict([point])
        rescale = prediction.median_s / total if total else 0.0
        return {part: float(seconds) * rescale for part, seconds in zip(PARTS, corrected, strict=True)}

    def factors(self) -> Mapping[str, float]:
        """Return part -> what its predicted time is multiplied with."""
        return {part: float(np.exp(value)) for part, value in zip(PARTS, self.log_factors, strict=True)}

    # ---- fitting ---------------------------------------------------------------------------------

    def _fit(self) -> None:
        table = _Table([timing.point for timing in self._timings])
        measured = np.log([timing.seconds for timing in self._timings])
        noise: _Floats = np.array([max(timing.spread, _LEAST_NOISE) ** 2 for timing in self._timings])
        scales = _SCALES if len(self._timings) >= _FEWEST_TO_SCALE else ((1.0, 1.0),)
        best = -math.inf
        for scale, probability in scales:
            fitted, factors, likelihood = self._fit_at(scale, table, measured, noise)
            if likelihood + math.log(probability) > best:
                best = likelihood + math.log(probability)
                self.scale, self._fitted, self.log_factors = scale, fitted, factors

    def _fit_at(
        self, scale: float, table: _Table, measured: _Floats, noise: _Floats
    ) -> tuple[_Fitted, _Floats, float]:
        """Return the fit for one scale of the effects, by rounds of Gauss-Newton, and its log likelihood."""
        effects = scale**2 * table.effects(table) + np.diag(noise)
        factors = self._prior.copy()
        for _ in range(_ROUNDS):
            predicted, shares = table.log_times(factors)
            total = (shares * self._variances) @ shares.T + effects
            off = measured - predicted + shares @ (factors - self._prior)
            weights = np.linalg.solve(total, off)
            step = self._prior + self._variances * (shares.T @ weights) - factors
            # A long step leaves the range in which the parts are nearly proportional.
            factors = factors + np.clip(step, -1.0, 1.0)
        predicted, shares = table.log_times(factors)
        total = (shares * self._variances) @ shares.T + effects
        off = measured - predicted + shares @ (factors - self._prior)
        weights = np.linalg.solve(total, off)
        _, log_determinant = np.linalg.slogdet(total)
        likelihood = -0.5 * float(off @ weights) - 0.5 * float(log_determinant)
        return _Fitted(table, shares, np.asarray(total), np.asarray(weights)), factors, likelihood

    def _covariance(self, shares: _Floats, at: _Table, others: _Floats, of: _Table) -> _Floats:
        return (shares * self._variances) @ others.T + self.scale**2 * at.effects(of)


@dataclasses.dataclass(frozen=True, slots=True)
class _Fitted:
    table: _Table
    shares: _Floats
    total: _Floats
    weights: _Floats


class _Table:
    """Points as arrays.

    Attributes:
        parts: (points, parts) seconds.
    """

    def __init__(self, points: Sequence[TimePoint]) -> None:
        self.parts: _Floats = np.maximum(np.array([point.parts.seconds for point in points]), 1e-12)
        self._stages = np.array([point.stage for point in points])
        self._logs: _Floats = np.log2([point.micro_batch_size for point in points]) / 3
        self._settings = [
            frozenset((path, repr(value)) for path, value in point.settings) for point in points
        ]
        self._structures = [
            (point.stage, settings) for point, settings in zip(points, self._settings, strict=True)
        ]

    def log_times(self, factors: _Floats) -> tuple[_Floats, _Floats]:
        """Return the logarithm of each time, and each part's share of it."""
        scaled = self.parts * np.exp(factors)
        total = scaled.sum(axis=1)
        return np.log(total), scaled / total[:, None]

    def own_variance(self) -> _Floats:
        """Return the variance of each point's own effects."""
        num_settings = np.array([len(settings) for settings in self._settings])
        fixed = _STAGE**2 + _STRUCTURE**2 + _POINT**2
        return fixed + _SETTING**2 * num_settings + (_STAGE_SLOPE**2 + _SLOPE**2) * self._logs**2

    def effects(self, other: _Table) -> _Floats:
        """Return the covariance of effects between the points of two tables."""
        same_stage = (self._stages[:, None] == other._stages[None, :]).astype(float)
        names = {one: idx for idx, one in enumerate(sorted(set().union(*self._settings, *other._settings)))}
        mine, theirs = (table._indicators(names) for table in (self, other))
        known = {one: idx for idx, one in enumerate(dict.fromkeys([*self._structures, *other._structures]))}
        left, right = (
            np.array([known[one] for one in table._structures])[:, None] for table in (self, other)
        )
        same = (left == right.T).astype(float)
        logs = self._logs[:, None] * other._logs[None, :]
        same_point = same * (self._logs[:, None] == other._logs[None, :])
        shared = mine @ theirs.T
        return np.asarray(
            same_stage * (_STAGE**2 + _STAGE_SLOPE**2 * logs)
            + _SETTING**2 * shared * (0.5 + 0.5 * same_stage)
            + same * (_STRUCTURE**2 + _SLOPE**2 * logs)
            + _POINT**2 * same_point
        )

    def _indicators(self, names: Mapping[tuple[str, str], int]) -> _Floats:
        found = np.zeros((len(self._settings), max(len(names), 1)))
        for idx, settings in enumerate(self._settings):
            for one in settings:
                found[idx, names[one]] = 1.0
        return found
