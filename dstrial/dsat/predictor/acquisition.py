"""Propose the most promising candidates of every group. Pure.

Groups (stage, offload, what ``--space`` names) are few, and all are looked at. Within one, knobs are changed one after the other
as long as the bound of its time falls (coordinate descent), so that many knobs may differ at once from what was measured, and a
single measurement tells about all of them. Memory and legality are asked only for what would be an improvement.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Sequence

from dstrial.dsat.core.candidate import Candidate
from dstrial.dsat.predictor.config_groups import ConfigGroups
from dstrial.dsat.predictor.predictor import Prediction, Predictor, structure_of
from dstrial.dsat.predictor.step_time import TimeModel
from dstrial.dsat.space.space import Structure

_MOST_CHANGES = 40
_BETTER = 1e-5
_STEPS = (0, 1, 2, -1)
_MAY_FIT = 0.3
"""Least probability to fit of what a group promises."""
_SURE_ENOUGH, _WORTH_RISK = 0.88, 0.03
"""What fits less surely than other candidates have to is proposed where it is expected to gain this."""
_LIKELY_ENOUGH, _WORTH_LAST_RISK = 0.7, 0.05
"""What fits still less surely is proposed where it is expected to gain this, for when nothing else is left."""
_HOPELESS_SPREADS, _HOPELESS = 3.0, 1.03
"""A group whose bound at so many standard deviations is above the best cost by this is not looked at again."""
_KEPT = 2
_KNOWN_AFTER = 2
"""Measurements of a group, after which its memory is known."""
_NEXT = 0.7
"""What a promise is worth, for which another measurement is needed after the one in question."""


@dataclasses.dataclass(frozen=True, slots=True)
class Proposal:
    """A candidate that could be measured next."""

    prediction: Prediction
    # a better one that may fit, once this one has told the group's memory
    promised: Prediction | None = None
    is_risk: bool = False  # may well run out of memory; for when nothing else is left

    def expected_improvement(self, cost: float) -> float:
        """Return the expected gain over a cost, its own or of what may follow from it."""
        gain = self.prediction.expected_improvement(cost) * self.prediction.probability_to_fit
        if self.promised is None:
            return gain
        return max(gain, _NEXT * self.promised.expected_improvement(cost) * self.promised.probability_to_fit)


class Acquisition:
    """Proposes candidates of every group; ``is_allowed`` does not look at memory."""

    def __init__(
        self, groups: ConfigGroups, predictor: Predictor, is_allowed: Callable[[Candidate], bool]
    ) -> None:
        self._groups, self._predictor = groups, predictor
        self._is_allowed = is_allowed
        self._starts: dict[tuple[object, ...], dict[Structure, None]] = {}

    def starts(self) -> list[Structure]:
        """Return where the next descents begin, besides the measured structures."""
        return [one for known in self._starts.values() for one in known]

    def find(
        self,
        positions: Sequence[int],
        *,
        fits: float,
        num_stds: float,
        time: TimeModel,
        measured: Collection[Candidate],
        cost: float | None = None,
    ) -> list[Proposal]:
        """Return a few candidates of each group that fit with probability ``fits``.

        Bounds lie ``num_stds`` standard deviations below the median; ``cost`` is that of the best, None before anything ran.
        """
        starts: dict[tuple[object, ...], list[Structure]] = {}
        for structure in (*self._groups.bases(), *(structure_of(one) for one in measured)):
            starts.setdefault(self._groups.group(structure), []).append(structure)
        num_measured: dict[tuple[object, ...], int] = {}
        for one in measured:
            group = self._groups.group(structure_of(one))
            num_measured[group] = num_measured.get(group, 0) + 1
        found: dict[Candidate, Proposal] = {}
        for group, bases in starts.items():
            known = self._starts.setdefault(group, {})
            descent = self._descent(positions, fits, time)
            begun = [*known, *bases]
            if known and cost is not None:
                seen = descent.best_start(begun, _HOPELESS_SPREADS)
                if seen is None or seen.lower_confidence_bound(_HOPELESS_SPREADS) > _HOPELESS * cost:
                    continue
            for log_stds in (num_stds, 0.0):
                proposal = descent.run(begun, log_stds)
                if proposal is not None:
                    found.setdefault(proposal.candidate, Proposal(self._predictor.completed(proposal)))
                    structure = structure_of(proposal.candidate)
                    known.pop(structure, None)
                    known[structure] = None
                    begun = [structure]
            while len(known) > _KEPT:
                del known[next(iter(known))]
            if fits <= _MAY_FIT or cost is None:
                continue
            is_known = num_measured.get(group, 0) >= _KNOWN_AFTER
            risky = self._descent(positions, _SURE_ENOUGH if is_known else _MAY_FIT, time)
            promised = risky.run(begun, num_stds)
            if promised is not None and promised.candidate not in found:
                risk = self._risk(promised, None if is_known else descent, cost)
                if risk is not None:
                    found[risk.prediction.candidate] = risk
        return list(found.values())

    def _risk(self, promised: Prediction, descent: _LocalSearch | None, cost: float) -> Proposal | None:
        """Return the measurement that a promise which may not fit is worth, or None.

        ``descent`` finds a measurement that would tell of the group's memory; None where that is known.
        """
        promised = self._predictor.completed(promised)
        worth = promised.expected_improvement(cost) * promised.probability_to_fit
        if promised.probability_to_fit >= _SURE_ENOUGH and worth >= _WORTH_RISK:
            return Proposal(promised)
        probe = None if descent is None else descent.probe(structure_of(promised.candidate))
        if probe is not None:
            return Proposal(self._predictor.completed(probe), promised)
        if promised.probability_to_fit >= _LIKELY_ENOUGH and worth >= _WORTH_LAST_RISK:
            return Proposal(promised, is_risk=True)
        return None

    def _descent(self, positions: Sequence[int], fits: float, time: TimeModel) -> _LocalSearch:
        return _LocalSearch(self._groups, self._predictor, self._is_allowed, positions, fits, time)


class _LocalSearch:
    """Coordinate descent within one group."""

    def __init__(
        self,
        groups: ConfigGroups,
        predictor: Predictor,
        is_allowed: Callable[[Candidate], bool],
        positions: Sequence[int],
        fits: float,
        time: TimeModel,
    ) -> None:
        self._groups, self._predictor, self._time = groups, predictor, time
        self._space = groups.space
        self._is_allowed, self._fits = is_allowed, fits
        self._positions = positions
        self._seen: dict[Candidate, Prediction] = {}

    def run(self, starts: Sequence[Structure], num_stds: float) -> Prediction | None:
        """Descend from the best start; return the least bound that may be measured."""
        begun = [one for start in dict.fromkeys(starts) if (one := self._start(start)) is not None]
        if not begun:
            return None
        at, place = min(begun, key=lambda one: one[0].lower_confidence_bound(num_stds))
        best = at if self._is_allowed(at.candidate) else None
        for _ in range(_MOST_CHANGES):
            moved = self._move(at, place, num_stds, best)
            if moved is None:
                return best
            at, place = moved
            if self._is_allowed(at.candidate):
                best = at
        return best

    def best_start(self, starts: Sequence[Structure], num_stds: float) -> Prediction | None:
        """Return the start with the least bound, at the largest micro batch that fits."""
        begun = [one[0] for start in dict.fromkeys(starts) if (one := self._start(start)) is not None]
        return min(begun, key=lambda one: one.lower_confidence_bound(num_stds)) if begun else None

    def probe(self, structure: Structure) -> Prediction | None:
        """Return a structure's largest fitting micro batch that may be measured, or None."""
        start = self._start(structure)
        for place in range(-1 if start is None else start[1], -1, -1):
            candidate = self._space.candidate(structure, self._positions[place])
            if self._is_allowed(candidate):
                return next(iter(self._predict([candidate])), None)
        return None

    def _start(self, structure: Structure) -> tuple[Prediction, int] | None:
        """Return a structure with its largest fitting micro batch, and the place of that."""
        if not self._groups.is_legal(structure):
            return None
        low, high = -1, len(self._positions) - 1
        while low < high:
            middle = (low + high + 1) // 2
            if self._may_fit(self._space.candidate(structure, self._positions[middle])):
                low = middle
            else:
                high = middle - 1
        if low < 0:
            return None
        found = self._predict([self._space.candidate(structure, self._positions[low])])
        return (found[0], low) if found else None

    def _move(
        self, at: Prediction, place: int, num_stds: float, best: Prediction | None
    ) -> tuple[Prediction, int] | None:
        """Return the best change of one knob, maybe with the micro batch; None without.

        If nothing may be measured so far, the change that costs least is taken.
        """
        structure = structure_of(at.candidate)
        others = [structure, *self._groups.moves(structure, self._predictor.num_params)]
        places = {
            self._space.candidate(one, self._positions[place + step]): place + step
            for one in others
            for step in _STEPS
            if 0 <= place + step < len(self._positions)
        }
        ranked = sorted(self._predict(list(places)), key=lambda one: one.lower_confidence_bound(num_stds))
        least = at.lower_confidence_bound(num_stds) * math.exp(-_BETTER)
        for one in ranked:
            is_better = one.lower_confidence_bound(num_stds) < least
            if not is_better and (best is not None or not self._is_allowed(one.candidate)):
                if best is not None:
                    return None
                continue
            if self._groups.is_legal(structure_of(one.candidate)) and self._may_fit(one.candidate):
                return one, places[one.candidate]
        return None

    def _predict(self, candidates: Sequence[Candidate]) -> list[Prediction]:
        new = [one for one in candidates if one not in self._seen]
        self._seen.update((one.candidate, one) for one in self._predictor.times(new, self._time))
        return [self._seen[one] for one in candidates if one in self._seen]

    def _may_fit(self, candidate: Candidate) -> bool:
        return self._predictor.probability_to_fit(candidate) >= self._fits
