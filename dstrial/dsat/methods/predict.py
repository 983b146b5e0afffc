"""``predict``: the user's own configuration first, then always what may be best; ends when nothing can be. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from dstrial.dsat.candidate import Candidate
from dstrial.dsat.ceilings import log_lines
from dstrial.dsat.forecast import Forecast, Forecaster
from dstrial.dsat.gates import Gates, Known
from dstrial.dsat.inputs import PredictInputs
from dstrial.dsat.methods.method import Action, Finish, Measure, MethodOptions, Note, Skip
from dstrial.dsat.outcome import Failure, FailureKind, Measured, Outcome, outcome_from_json, outcome_to_json
from dstrial.dsat.space import Space, Structure
from dstrial.dsat.structures import Structures, positions

_TIE = 1.01
"""What cannot be better than the incumbent by this is not measured."""
_BOUND_SPREADS = 1.28
"""The bound lies so many spreads below the median cost: nine in ten are above it."""
_PATIENCE = 14
"""Bounds that have so often promised more than was measured are no longer believed; fewer disappointments count in part."""
_FITS = 0.98
"""Least probability to fit of what is measured."""
_NEIGHBOURS_WITHIN = 1.05
"""One knob more is changed in structures that are within this of the incumbent."""
_BEYOND = 8
_LONGEST_STEPS, _LEAST_S, _BUILD_S = 70, 6.0, 30.0
_NEED_SMALLEST = "You may need to specify a configuration which can successfully run with train_micro_batch_size_per_gpu = 1."


class PredictSearch:
    """Measures what has the best bound, learns, and stops when no bound left is better than the incumbent by 1 %.

    Structures that differ in what changes most (stage, offload, overlap, ``--space``) are there from the beginning, those
    that differ in one more knob once a structure has proved to be about the best.

    Args:
        space: what is searched.
        options: of the search; the seed is not needed, for nothing is random.
        gates: what need not be measured.
        inputs: dry runs and machine; None to begin with what the first measurement tells.
    """

    def __init__(
        self, space: Space, options: MethodOptions, gates: Gates, inputs: PredictInputs | None = None
    ) -> None:
        self.space = space
        self.options = options
        self.gates = gates
        given = inputs or PredictInputs()
        self.structures = Structures(space, is_cpu=given.is_cpu)
        self.forecaster = Forecaster(self.structures, given, options.metric)
        self.known: dict[int, Known] = {}
        self._order: list[int] = []
        self._forecasts: dict[int, dict[str, Any]] = {}
        self._left: list[tuple[Candidate, float]] = []
        self._barred: set[Structure] = set()
        self._skipped: set[Candidate] = set()
        self._neighbours: dict[Structure, list[Structure]] = {}
        self._host_limit_bytes: float | None = None
        self._is_finished = False

    # ---- the contract ----------------------------------------------------------------------------

    def start(self) -> list[Action]:
        """Measure the user's own configuration."""
        actions: list[Action] = [Note(text) for text in self.forecaster.inputs.notes]
        return [*actions, self._measure(self.space.own(), "your configuration")]

    def on_result(self, trial_id: int, outcome: Outcome) -> list[Action]:
        """Learn from how a measurement ended, and choose anew.

        Raises:
            KeyError: nothing of this number is being measured.
        """
        if self._is_finished:
            return []
        known = self.known[trial_id]
        self._learn(trial_id, outcome)
        if isinstance(outcome, Failure) and outcome.kind in (FailureKind.USER_ERROR, FailureKind.CANCELED):
            return self._finish(f"{outcome.kind.value}: {outcome.message}")
        actions: list[Action] = []
        if known.candidate.is_own and isinstance(outcome, Measured) and self.forecaster.info is not None:
            lines = log_lines(
                self.forecaster.info, self.space.stages, self.space.replicas, self.space.bytes_per_value
            )
            actions += [Note(line) for line in lines]
        return [*actions, *self._fill()]

    def snapshot(self) -> dict[str, Any]:
        """Return the whole state as JSON values, and what was predicted of each trial before it was measured."""
        return {
            "is_finished": self._is_finished,
            "order": list(self._order),
            "known": [
                {
                    "trial_id": trial_id,
                    "candidate": known.candidate.to_json(),
                    "outcome": None if known.outcome is None else outcome_to_json(known.outcome),
                }
                for trial_id, known in self.known.items()
            ],
            "skipped": [candidate.to_json() for candidate in self._sorted_skipped()],
            "forecasts": {str(trial_id): forecast for trial_id, forecast in self._forecasts.items()},
            "factors": dict(self.forecaster.time.factors()),
            "left": [
                {"description": self.space.describe(one), "candidate": one.to_json(), "gain": gain}
                for one, gain in self._left
            ],
        }

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Go on where a snapshot was taken, by learning everything again in its order."""
        outcomes: dict[int, Outcome] = {}
        for fields in snapshot["known"]:
            candidate = Candidate.from_json(fields["candidate"])
            self.known[fields["trial_id"]] = Known(candidate, None)
            if fields["outcome"] is not None:
                outcomes[fields["trial_id"]] = outcome_from_json(fields["outcome"])
        self._skipped = {Candidate.from_json(fields) for fields in snapshot["skipped"]}
        self._forecasts = {int(trial_id): dict(one) for trial_id, one in snapshot["forecasts"].items()}
        for trial_id in snapshot["order"]:
            self._learn(trial_id, outcomes[trial_id])
        self._is_finished = bool(snapshot["is_finished"])

    # ---- learning --------------------------------------------------------------------------------

    def _learn(self, trial_id: int, outcome: Outcome) -> None:
        candidate = self.known[trial_id].candidate
        self.known[trial_id] = Known(candidate, outcome)
        self._order.append(trial_id)
        self.forecaster.learn(candidate, outcome)
        if not isinstance(outcome, Failure):
            return
        if outcome.kind is FailureKind.HOST_OOM:
            needed = self.forecaster.host_bytes(candidate)
            self._host_limit_bytes = min(needed, self._host_limit_bytes or needed)
        repeated = [
            known
            for known in self.known.values()
            if known.candidate == candidate and isinstance(known.outcome, Failure)
        ]
        if not outcome.kind.is_out_of_memory and (
            outcome.kind is not FailureKind.COMMUNICATION or len(repeated) > 1
        ):
            self._barred.add(_structure(candidate))

    def incumbent(self) -> tuple[Candidate, float] | None:
        """Return the best measured configuration and its cost; the user's own unless another is better by more than 1 %."""
        best: tuple[Candidate, float] | None = None
        for known in self.known.values():
            cost = None if known.outcome is None else self.forecaster.cost(known.candidate, known.outcome)
            if cost is not None and (best is None or cost < best[1]):
                best = known.candidate, cost
        return best

    def _incumbent_smoothed(self) -> tuple[Candidate, float] | None:
        """Return the best measured configuration and its cost as all measurements together have it.

        The best of many measurements is in part the luckiest one.
        """
        best = self.incumbent()
        if best is None:
            return None
        known = self.forecaster.forecasts([best[0]])
        return best[0], max(best[1], known[0].cost) if known else best[1]

    def _num_disappointed(self) -> int:
        """Return how many of the last measurements in a row were not better than all before them by more than 1 %."""
        number, best = 0, None
        for trial_id in self._order:
            known = self.known[trial_id]
            assert known.outcome is not None
            cost = self.forecaster.cost(known.candidate, known.outcome)
            if cost is not None and (best is None or cost * _TIE < best):
                number = 0
            elif best is not None:
                number += 1
            if cost is not None:
                best = cost if best is None else min(best, cost)
        return number

    # ---- choosing --------------------------------------------------------------------------------

    def _fill(self) -> list[Action]:
        actions: list[Action] = []
        while True:
            is_open = [known.candidate for known in self.known.values() if known.outcome is None]
            if len(self.known) >= self.options.max_trials:
                if is_open:
                    return actions
                return [*actions, *self._finish(f"all {len(self.known)} trials completed")]
            if len(is_open) >= self.options.num_parallel:
                return actions
            chosen = self._choose(is_open, actions)
            if chosen is None:
                if is_open:
                    return actions
                return [*actions, *self._finish(self._reason())]
            actions.append(chosen)

    def _choose(self, is_open: Sequence[Candidate], actions: list[Action]) -> Measure | None:
        """Return what is measured next; what a gate keeps out is added to ``actions``."""
        best = self._incumbent_smoothed()
        num_spreads = _BOUND_SPREADS * max(0.0, 1 - self._num_disappointed() / _PATIENCE)
        forecasts = self._candidates(is_open)
        if not forecasts:
            return self._without_forecast(best, is_open)
        fitting = [one for one in forecasts if one.probability_to_fit >= _FITS]
        if best is None:
            # Nothing ran so far: what most probably fits, and of those what is fastest.
            ranked = sorted(fitting, key=lambda one: one.cost) or sorted(
                forecasts, key=lambda one: -one.probability_to_fit
            )
        else:
            ranked = sorted(fitting, key=lambda one: one.bound(num_spreads))
            self._left = [(one.candidate, best[1] / one.bound(num_spreads) - 1) for one in ranked[:10]]
        for forecast in ranked:
            if best is not None and forecast.bound(num_spreads) * _TIE >= best[1]:
                return None
            verdict = self.gates.check(forecast.candidate, list(self.known.values()))
            if verdict is None:
                return self._measure(forecast.candidate, self._why(forecast, best, num_spreads), forecast)
            self._skipped.add(forecast.candidate)
            if verdict.kind in ("illegal", "hopeless"):
                actions.append(Skip(forecast.candidate, verdict.reason))
        return None

    def _candidates(self, is_open: Sequence[Candidate]) -> list[Forecast]:
        """Return forecasts of everything that could be measured next."""
        time = self.forecaster.supposing(is_open)
        structures = [one for one in self._structures() if one not in self._barred]
        reachable = self._positions()
        tried = {self._sameness(known.candidate) for known in self.known.values() if self._is_tried(known)}
        candidates = [
            candidate
            for structure in structures
            for position in reachable
            if (candidate := self.space.candidate(structure, position)) not in self._skipped
            and self._sameness(candidate) not in tried
            and not self._is_too_large_for_host(candidate)
        ]
        return self.forecaster.forecasts(candidates, time)

    def _structures(self) -> list[Structure]:
        """Return the bases, and the neighbours of what is about the best of the measured structures."""
        found = list(self.structures.bases())
        best = self.incumbent()
        if best is None:
            return found
        near = {}
        for known in self.known.values():
            cost = None if known.outcome is None else self.forecaster.cost(known.candidate, known.outcome)
            if cost is not None and cost <= best[1] * _NEIGHBOURS_WITHIN:
                near[_structure(known.candidate)] = cost
        for structure in sorted(near, key=lambda one: near[one])[:3]:
            if structure not in self._neighbours:
                self._neighbours[structure] = self.structures.neighbours(
                    structure, self.forecaster.num_params
                )
            found += self._neighbours[structure]
        return list(dict.fromkeys(found))

    def _positions(self) -> Sequence[int]:
        """Return the positions of the ladder; up to 8 times what has run, where dry runs or the memory's size are not known."""
        is_known = bool(self.forecaster.inputs.runs)
        is_limited = not self.space.ladder.is_free or self.forecaster.memory.device.capacity_bytes is not None
        if is_known and is_limited:
            return positions(self.space)
        ran = [
            known.candidate.batch.micro_batch_size
            for known in self.known.values()
            if isinstance(known.outcome, Measured)
        ]
        largest = _BEYOND * max(ran, default=self.space.own().batch.micro_batch_size)
        return [
            position
            for position in positions(self.space, largest)
            if self.space.ladder.split(position).micro_batch_size <= largest
        ]

    def _without_forecast(
        self, best: tuple[Candidate, float] | None, is_open: Sequence[Candidate]
    ) -> Measure | None:
        """Where nothing can be predicted: try the user's structure with the smallest micro batch, once."""
        smallest = self.space.smallest()
        is_smaller = smallest.batch.micro_batch_size < self.space.own().batch.micro_batch_size
        if best is not None or is_open or not is_smaller or len(self.known) > 1:
            return None
        return self._measure(smallest, "your structure with the smallest micro batch")

    def _sameness(self, candidate: Candidate) -> tuple[Any, ...]:
        return candidate.stage, candidate.settings, candidate.batch.micro_batch_size

    @staticmethod
    def _is_tried(known: Known) -> bool:
        return not (isinstance(known.outcome, Failure) and known.outcome.kind is FailureKind.COMMUNICATION)

    def _is_too_large_for_host(self, candidate: Candidate) -> bool:
        limit = self._host_limit_bytes
        return limit is not None and limit > 0 and self.forecaster.host_bytes(candidate) >= limit

    def _why(self, forecast: Forecast, best: tuple[Candidate, float] | None, num_spreads: float) -> str:
        if best is None:
            return "predicted to fit" if forecast.probability_to_fit >= _FITS else "the smallest prediction"
        likely, bound = best[1] / forecast.cost - 1, best[1] / forecast.bound(num_spreads) - 1
        return f"predicted {likely:+.1%}, at best {bound:+.1%}"

    def _measure(self, candidate: Candidate, why: str, forecast: Forecast | None = None) -> Measure:
        trial_id = len(self.known) + 1
        if forecast is None:
            forecast = next(iter(self.forecaster.forecasts([candidate])), None)
        self.known[trial_id] = Known(candidate, None)
        predicted_s = None
        if forecast is not None:
            self._forecasts[trial_id] = self.forecaster.explain(forecast)
            if self.incumbent() is not None:
                predicted_s = _BUILD_S + max(_LONGEST_STEPS * forecast.time.quantile(2.0), _LEAST_S)
        return Measure(trial_id, candidate, why, predicted_s)

    def _reason(self) -> str:
        if self.incumbent() is None:
            failed = [one.outcome for one in self.known.values() if isinstance(one.outcome, Failure)]
            last = failed[-1].kind.value if failed else "nothing was measured"
            return f"nothing could be measured ({last}). {_NEED_SMALLEST}"
        return "nothing left can be better by more than 1 %"

    def _finish(self, reason: str) -> list[Action]:
        self._is_finished = True
        return [Finish(reason, self.incumbent() is None)]

    def _sorted_skipped(self) -> list[Candidate]:
        return sorted(self._skipped, key=lambda one: repr(dataclasses.astuple(one)))


def _structure(candidate: Candidate) -> Structure:
    return Structure(candidate.stage, candidate.settings)
