"""Find configurations that are worth a measurement, in each group.

Configurations of one group have the same ZeRO stage, the same offload devices and the same values of those ``--space`` keys
whose effect is unknown. In each group, coordinate descent changes one setting at a time while the lower confidence bound of the
predicted cost falls. All configurations that it visits are candidates.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from dstrial.dsat.core.candidate import Candidate
from dstrial.dsat.predictor.config_groups import ConfigGroups, structure_of
from dstrial.dsat.predictor.models import StepModel
from dstrial.dsat.predictor.predictor import Prediction, Predictor
from dstrial.dsat.space.space import Structure

_MAX_CHANGES = 30
_MIN_CHANGE = 1e-4  # of the log cost; a change that gains less ends a descent
_FITS = 0.85  # lowest probability to fit that a descent accepts
_BOUNDS = (1.5, 0.0)  # standard deviations below the median at which candidates of a group are compared
_HOPELESS_STDS, _HOPELESS = 3.0, 1.03
"""A group is not searched if its cost, this many standard deviations below the median, exceeds the best cost by this factor."""
_OOM_COST = 0.2  # cost of running out of memory, as a share of the best cost
_MIN_TO_FIT = 0.5

_Place = tuple[Prediction, int]  # a prediction, and the index of its micro batch among the positions


def worth(prediction: Prediction, cost: float, num_failed: int = 0) -> float:
    """Return a candidate's expected relative gain, minus the expected loss by OOM.

    The gain is relative to ``cost``, the best measured cost. The loss grows with ``num_failed``, the number of out-of-memory
    errors so far. Returns 0 if the candidate probably does not fit.
    """
    fits = prediction.probability_to_fit
    if fits < _MIN_TO_FIT:
        return 0.0
    return fits * prediction.expected_improvement(cost) - (1 - fits) * _OOM_COST * (1 + num_failed)


class Acquisition:
    """Proposes the most promising candidates of each group of configurations.

    A group shares ZeRO stage, offloading and settings of unknown effect.
    """

    def __init__(self, groups: ConfigGroups, predictor: Predictor) -> None:
        self._groups, self._predictor = groups, predictor
        self._ends: dict[tuple[Any, ...], Structure] = {}  # group -> where its last descent ended
        self._seen: dict[Candidate, Prediction] = {}
        self._positions: Sequence[int] = ()
        self._time: StepModel | None = None

    def candidates(
        self,
        positions: Sequence[int],
        time: StepModel,
        measured: Iterable[Candidate],
        cost: float | None,
    ) -> list[Prediction]:
        """Return the predictions of all candidates for the next measurement.

        ``positions`` are the allowed micro batches, as indices in the grid. The descents start at ``measured``, at the groups'
        default settings and where earlier descents ended. ``cost`` is the best measured cost; None before anything has run.
        """
        self._seen, self._positions, self._time = {}, positions, time
        starts: dict[tuple[Any, ...], list[Structure]] = {}
        for structure in (*self._groups.bases(), *map(structure_of, measured)):
            starts.setdefault(self._groups.group(structure), []).append(structure)
        for group, structures in starts.items():
            known = [self._ends[group]] if group in self._ends else []
            end = self._descend([*known, *structures], cost)
            if end is not None:
                self._ends[group] = end
        return list(self._seen.values())

    def _descend(self, starts: Iterable[Structure], cost: float | None) -> Structure | None:
        """Return the configuration at which a descent from the best of ``starts`` ends.

        None if no configuration of the group is likely to reach ``cost``, the best measured cost.
        """
        places = [one for start in dict.fromkeys(starts) if (one := self._start(start)) is not None]
        at: _Place | None = None
        for stds in _BOUNDS:
            at = at or min(places, key=lambda one: one[0].lower_confidence_bound(stds), default=None)
            if at is None:
                return None
            if cost is not None and at[0].lower_confidence_bound(_HOPELESS_STDS) > _HOPELESS * cost:
                return None
            for _ in range(_MAX_CHANGES):
                moved = self._move(*at, stds)
                if moved is None:
                    break
                at = moved
        return None if at is None else structure_of(at[0].candidate)

    def _start(self, structure: Structure) -> _Place | None:
        """Return (prediction, index) of the fitting micro batch with the lowest cost."""
        if not self._groups.is_legal(structure):
            return None
        found = self._predict([(structure, idx) for idx in range(len(self._positions))])
        fitting = [one for one in found if one[0].probability_to_fit >= _FITS] or found[:1]
        return min(fitting, key=lambda one: one[0].cost, default=None)

    def _move(self, at: Prediction, idx: int, stds: float) -> _Place | None:
        """Return the best change of a setting, of the micro batch, or of both.

        None if no change lowers the cost. Costs are compared at ``stds`` standard deviations below their medians.
        """
        structure = structure_of(at.candidate)
        others = self._groups.moves(structure, self._predictor.num_params)
        changes = [(structure, idx + step) for step in (-1, 1, 2)]
        changes += [(other, idx + step) for other in others for step in (0, 1)]
        fitting = [one for one in self._predict(changes) if one[0].probability_to_fit >= _FITS]
        best = min(fitting, key=lambda one: one[0].lower_confidence_bound(stds), default=None)
        least = at.lower_confidence_bound(stds) * math.exp(-_MIN_CHANGE)
        return best if best is not None and best[0].lower_confidence_bound(stds) < least else None

    def _predict(self, changes: Sequence[tuple[Structure, int]]) -> list[_Place]:
        space = self._predictor.space
        indices = {
            space.candidate(structure, self._positions[idx]): idx
            for structure, idx in changes
            if 0 <= idx < len(self._positions)
        }
        new = [one for one in indices if one not in self._seen]
        self._seen |= {one.candidate: one for one in self._predictor.predictions(new, self._time)}
        return [(self._seen[one], idx) for one, idx in indices.items() if one in self._seen]
