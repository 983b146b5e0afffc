"""Sums of parts of uncertain size, learned from measured sums. Pure.

The logarithm of a quantity (a step's time, a peak of memory) is that of the sum of its parts, each times a factor of its own,
plus effects of what the parts know nothing of: those of a group of configurations, of a setting, of one structure. Factors and
effects have normal priors; every measurement narrows them, and rows that share factors and effects move together.

Source: Bayesian linear regression around the most probable factors, in its kernel form (Rasmussen and Williams 2006,
chapter 2); the effects' common scale by marginal likelihood; measurements far off weigh less (Huber 1964).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

_Floats = NDArray[np.float64]

_LEAST_NOISE = 0.003
_ROUNDS, _ROUNDS_BEFORE_DOUBT = 12, 8
_SCALES = ((0.25, 0.05), (0.4, 0.15), (0.6, 0.25), (1.0, 0.35), (2.0, 0.15), (4.0, 0.05))
"""By how much all effects may differ from what is assumed of them, and how probable that is beforehand."""
_FEWEST_TO_SCALE = 8
_FAR = 2.5
"""So many spreads off, a measurement begins to count less; twice that far it counts as four times less certain."""

Effects = tuple[tuple[Hashable, float], ...]
"""(name, standard deviation) of each effect that a row has; rows with an effect of the same name share it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One quantity, before any correction."""

    parts: tuple[float, ...]  # of its sum, always in the same order
    effects: Effects  # on its logarithm

    @property
    def variance(self) -> float:
        return sum([log_std * log_std for _, log_std in self.effects])


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """A measured quantity."""

    row: Row
    value: float
    log_std: float  # of its logarithm
    is_least: bool = False  # the value is a lower bound only


class AdditiveRegression:
    """Predicts sums; ``priors``: mean, deviation of the logarithm of each factor."""

    def __init__(
        self,
        priors: Sequence[tuple[float, float]],
        seen: Sequence[Sample] = (),
        *,
        is_robust: bool = True,  # a measurement may be far off now and then
    ) -> None:
        self._is_robust = is_robust
        self._prior: _Floats = np.array([mean for mean, _ in priors])
        self._variances: _Floats = np.array([log_std for _, log_std in priors]) ** 2
        self.log_factors: _Floats = self._prior.copy()
        self.scale = 1.0
        self._fitted: _Fitted | None = None
        if seen:
            self._learn(seen)

    def predict(self, rows: Sequence[Row]) -> tuple[_Floats, _Floats]:
        """Return median and standard deviation of the logarithm of each row, (rows,) each."""
        if not rows:
            return np.zeros(0), np.zeros(0)
        parts = _parts(rows)
        medians, shares = _log_sums(parts, self.log_factors)
        own: _Floats = np.array([row.variance for row in rows])
        variances = (shares**2 @ self._variances) + self.scale**2 * own
        fitted = self._fitted
        if fitted is not None:
            residual = self.scale**2 * (_features(rows, fitted.names) @ fitted.features.T)
            across = (shares * self._variances) @ fitted.shares.T + residual
            medians = medians + residual @ fitted.weights
            variances = variances - np.sum((across @ fitted.inverse) * across, axis=1)
        return medians, np.sqrt(np.maximum(variances, 0.0) + _LEAST_NOISE**2)

    def factors(self) -> list[float]:
        """Return the factor of each part."""
        return [float(value) for value in np.exp(self.log_factors)]

    # ---- fitting ---------------------------------------------------------------------------------

    def _learn(self, seen: Sequence[Sample]) -> None:
        firm = [one for one in seen if not one.is_least]
        if firm:
            self._fit(firm)
        doubtful = [one for one in seen if one.is_least]
        if doubtful:
            # A lower bound above the prediction is news; the value is assumed to exceed the bound by half a spread.
            medians, log_stds = self.predict([one.row for one in doubtful])
            told = [
                dataclasses.replace(one, value=one.value * math.exp(0.5 * log_std), is_least=False)
                for one, median, log_std in zip(doubtful, medians, log_stds, strict=True)
                if median < math.log(one.value) + 0.5 * log_std
            ]
            if told:
                self._fit([*firm, *told])

    def _fit(self, seen: Sequence[Sample]) -> None:
        rows = [one.row for one in seen]
        names = {
            name: idx for idx, name in enumerate(dict.fromkeys(n for row in rows for n, _ in row.effects))
        }
        parts, features = _parts(rows), _features(rows, names)
        measured = np.log([one.value for one in seen])
        noise: _Floats = np.array([max(one.log_std, _LEAST_NOISE) ** 2 for one in seen])
        best = -math.inf
        for scale, probability in _SCALES if len(seen) >= _FEWEST_TO_SCALE else ((1.0, 1.0),):
            fitted, factors, likelihood = self._fit_at(scale, parts, features, names, measured, noise)
            if likelihood + math.log(probability) > best:
                best = likelihood + math.log(probability)
                self.scale, self._fitted, self.log_factors = scale, fitted, factors

    def _fit_at(
        self,
        scale: float,
        parts: _Floats,
        features: _Floats,
        names: Mapping[Hashable, int],
        measured: _Floats,
        noise: _Floats,
    ) -> tuple[_Fitted, _Floats, float]:
        """Fit at one scale of effects by Gauss-Newton; return fit and log likelihood."""
        effects = scale**2 * (features @ features.T)
        factors, doubled = self._prior.copy(), noise.copy()
        for number in range(_ROUNDS):
            predicted, shares = _log_sums(parts, factors)
            total = (shares * self._variances) @ shares.T + effects + np.diag(doubled)
            off = measured - predicted + shares @ (factors - self._prior)
            weights = np.linalg.solve(total, off)
            if self._is_robust and number >= _ROUNDS_BEFORE_DOUBT:
                # The unexplained rest of each sample is its variance times its weight.
                left = np.abs(weights) * doubled / (_FAR * np.sqrt(noise))
                doubled = noise * np.maximum(left, 1.0) ** 2
            step = self._prior + self._variances * (shares.T @ weights) - factors
            # A long step leaves the range in which the parts are nearly proportional.
            factors = factors + np.clip(step, -1.0, 1.0)
        predicted, shares = _log_sums(parts, factors)
        total = (shares * self._variances) @ shares.T + effects + np.diag(doubled)
        off = measured - predicted + shares @ (factors - self._prior)
        inverse = np.linalg.inv(total)
        weights = inverse @ off
        _, log_determinant = np.linalg.slogdet(total)
        likelihood = -0.5 * float(off @ weights) - 0.5 * float(log_determinant)
        return (
            _Fitted(names, features, shares, np.asarray(inverse, dtype=np.float64), weights),
            factors,
            likelihood,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _Fitted:
    names: Mapping[Hashable, int]
    features: _Floats
    shares: _Floats
    inverse: _Floats
    weights: _Floats


def _parts(rows: Sequence[Row]) -> _Floats:
    return np.maximum(np.array([row.parts for row in rows], dtype=np.float64), 1e-12)


def _log_sums(parts: _Floats, factors: _Floats) -> tuple[_Floats, _Floats]:
    """Return the logarithm of each sum, and each part's share of it."""
    scaled = parts * np.exp(factors)
    total = scaled.sum(axis=1)
    return np.log(total), scaled / total[:, None]


def _features(rows: Sequence[Row], names: Mapping[Hashable, int]) -> _Floats:
    found = np.zeros((len(rows), max(len(names), 1)))
    for at, row in enumerate(rows):
        for name, log_std in row.effects:
            idx = names.get(name)
            if idx is not None:
                found[at, idx] = log_std
    return found
