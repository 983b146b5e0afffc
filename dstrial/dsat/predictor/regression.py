"""Bayesian regression on logarithms, by rounds of Gauss-Newton.

A measured quantity y (seconds, bytes) is a sum of known parts p, each times a factor f >= 0. Effects e account for what the
parts do not model: ``log y = log(p . f) + e + noise``. Each round solves the linearization at the previous estimate of p . f,
the first at y. docs/explanation/dsat-model.md has the equations.

Source: Rasmussen and Williams 2006, chapter 2 (kernel form); O'Hagan and Forster 2004, chapter 11 (unknown scale of variances).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

_Floats = NDArray[np.float64]

Effects = tuple[tuple[Hashable, float], ...]
"""(name, standard deviation) of each effect of a row. A negative deviation reverses the effect. Rows share effects by name."""

_PRIOR_ROWS = 8.0  # the assumed spreads weigh as much as this many measured rows
_MIN_SCALE, _MAX_SCALE = 0.7, 4.0  # limits of the common scale of all spreads
_MIN_FACTOR = 0.05  # lower bound of a factor, as a share of its prior mean
_LARGE = 0.03  # small residuals do not shrink effects with a larger standard deviation
_MIN_SPREAD = 0.003  # lowest relative standard deviation of a prediction
_OUTLIER = 3.0  # an outlier is this many standard deviations from what all other rows predict
_OUTLIER_NOISE = 0.05  # relative noise of an outlier's row
_MAX_ROUNDS, _CONVERGED = 20, 0.003  # rounds end when no sum of parts changes by more than this share


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """A quantity to measure or to predict: the sizes of its parts, and its effects.

    An effect is a relative error that similar quantities share (``Effects``).
    """

    parts: tuple[float, ...]
    effects: Effects


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """A measured value of a quantity, or a lower bound of it."""

    row: Row
    value: float
    noise: float  # relative standard deviation
    is_least: bool = False  # the value is a lower bound of the quantity


class Regression:
    """Predicts quantities, such as seconds or bytes, from measured ``samples``.

    A quantity is a sum of known parts, each times a factor; effects multiply the sum. ``priors`` are the (mean, relative
    standard deviation) of each factor before any sample. ``is_scaled`` multiplies the prior means by the median ratio of
    measured to expected values. ``is_robust`` gives outliers less weight. It also lets small residuals shrink the assumed
    standard deviations.
    """

    def __init__(
        self,
        priors: Sequence[tuple[float, float]],
        samples: Sequence[Sample] = (),
        *,
        is_scaled: bool = False,
        is_robust: bool = True,
    ) -> None:
        self.factors: _Floats = np.array([mean for mean, _ in priors])
        self._deviations: _Floats = self.factors * np.array([deviation for _, deviation in priors])
        self._is_scaled, self._is_robust = is_scaled, is_robust
        self.scale = 1.0
        self._fit: _Fit | None = None
        self._prior, self._predicted = self.factors, self._deviations
        exact = [one for one in samples if not one.is_least]
        if exact:
            self._learn(exact)
        # A lower bound below the prediction is ignored; a lower bound above it counts as a measured value.
        bounds = [one for one in samples if one.is_least and self.predict([one.row])[0][0] < one.value]
        if bounds:
            self._learn([*exact, *bounds])

    def predict(self, rows: Sequence[Row]) -> tuple[_Floats, _Floats]:
        """Return (medians, relative standard deviations) of the predicted quantities."""
        if not rows:
            return np.zeros(0), np.zeros(0)
        parts = _parts(rows)
        medians = parts @ self.factors
        shares = parts * self._predicted / medians[:, None]
        variances: _Floats = np.sum(shares**2, axis=1) + np.array(
            [sum([std * std for _, std in row.effects]) for row in rows]
        )
        if self._fit is not None:
            fit = self._fit
            effects = _effects(rows, fit.names) @ fit.effects.T
            across = shares @ fit.shares.T + effects
            medians = medians * np.exp(effects @ fit.weights)
            variances = variances - np.sum((across @ fit.inverse) * across, axis=1)
        variances = self.scale**2 * np.maximum(variances, _MIN_SPREAD**2)
        if self._fit is not None and self.scale < 1:
            # Small residuals do not reduce the uncertainty of large effects that no sample has.
            unknown = [
                sum([std * std for name, std in row.effects if std > _LARGE and name not in self._fit.names])
                for row in rows
            ]
            variances = variances + (1 - self.scale**2) * np.array(unknown)
        return medians, np.sqrt(variances)

    def _learn(self, samples: Sequence[Sample]) -> None:
        rows = [one.row for one in samples]
        values: _Floats = np.array([one.value for one in samples])
        parts, noise = _parts(rows), np.array([one.noise for one in samples]) ** 2
        if self._is_scaled:
            ratio = float(np.median(values / (parts @ self._prior)))
            self._prior, self._deviations = self._prior * ratio, self._deviations * ratio
        names = {
            name: idx for idx, name in enumerate(dict.fromkeys(n for row in rows for n, _ in row.effects))
        }
        effects = _effects(rows, names)
        sums = values
        for _ in range(_MAX_ROUNDS):
            # Gauss-Newton: the logarithm of a sum of parts is linear near the sum estimated in the round before.
            fit = self._solve(names, parts / sums[:, None], 1 + np.log(values / sums), effects, noise)
            before, sums = sums, parts @ self.factors
            if np.max(np.abs(sums / before - 1)) < _CONVERGED:
                break
        # The residual of a row from a fit to all others is its weight over the inverse's diagonal (leave one out).
        far = np.abs(fit.weights) > _OUTLIER * self.scale * np.sqrt(np.diag(fit.inverse))
        if self._is_robust and np.any(far):
            noise = np.where(far, np.maximum(noise, _OUTLIER_NOISE**2), noise)
            fit = self._solve(names, parts / sums[:, None], 1 + np.log(values / sums), effects, noise)
        self._fit = fit

    def _solve(
        self,
        names: Mapping[Hashable, int],
        scaled: _Floats,
        measured: _Floats,
        effects: _Floats,
        noise: _Floats,
    ) -> _Fit:
        """Solve one round of the regression; return the posterior.

        ``scaled`` are each row's parts, divided by the row's sum in the previous round. ``measured`` are 1 plus the logarithm
        of value / sum. ``noise`` are variances. Each factor is at least ``_MIN_FACTOR`` of its prior mean.
        """
        mean, deviations = self._prior.copy(), self._deviations.copy()
        while True:
            shares = scaled * deviations
            inverse: _Floats = np.asarray(
                np.linalg.inv(shares @ shares.T + effects @ effects.T + np.diag(noise)), dtype=np.float64
            )
            off = measured - scaled @ mean
            weights = inverse @ off
            factors = mean + deviations * (shares.T @ weights)
            below = (factors < _MIN_FACTOR * self._prior) & (deviations > 0)
            if not np.any(below):
                break
            mean[below], deviations[below] = _MIN_FACTOR * self._prior[below], 0.0
        # Spreads grow with the residuals: the posterior mean of their common scale.
        ratio = (_PRIOR_ROWS + float(off @ weights)) / (_PRIOR_ROWS + len(off))
        least = _MIN_SCALE if self._is_robust else 1.0
        self.scale = float(np.clip(math.sqrt(ratio), least, _MAX_SCALE))
        self.factors = factors
        self._predicted = np.where(deviations == 0.0, _MIN_FACTOR * self._prior, deviations)
        return _Fit(names, effects, shares, inverse, weights)


@dataclasses.dataclass(frozen=True, slots=True)
class _Fit:
    names: Mapping[Hashable, int]
    effects: _Floats
    shares: _Floats
    inverse: _Floats
    weights: _Floats


def _parts(rows: Sequence[Row]) -> _Floats:
    return np.maximum(np.array([row.parts for row in rows], dtype=np.float64), 1e-12)


def _effects(rows: Sequence[Row], names: Mapping[Hashable, int]) -> _Floats:
    found = np.zeros((len(rows), max(len(names), 1)))
    for at, row in enumerate(rows):
        for name, deviation in row.effects:
            idx = names.get(name)
            if idx is not None:
                found[at, idx] = deviation
    return found
