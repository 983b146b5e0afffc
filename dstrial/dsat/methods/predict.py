"""``predict``: measure the user's own, then what may be best, while any may. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from dstrial.dsat.core.candidate import Candidate
from dstrial.dsat.core.outcome import Failure, FailureKind, Measured, Outcome, outcome_to_json
from dstrial.dsat.methods.base import (
    Action,
    Finish,
    Measure,
    MethodEntry,
    MethodOptions,
    Note,
    ReportFacts,
    Skip,
)
from dstrial.dsat.methods.progress import explained, incumbent, incumbent_smoothed, margins, num_disappointed
from dstrial.dsat.predictor.acquisition import Proposal, Proposals
from dstrial.dsat.predictor.config_groups import Structures, positions, positions_near
from dstrial.dsat.predictor.predictor import Forecast, Forecaster, structure_of
from dstrial.dsat.predictor.profiles import PredictInputs, log_lines
from dstrial.dsat.predictor.step_time import TimeModel
from dstrial.dsat.space.filters import Gates, Known
from dstrial.dsat.space.space import Space, Structure

_LEAST_GAIN = 0.0008
"""The search ends when no measurement is expected to gain more than this; what is worse than the best is not taken."""
_PATIENCE = 12
"""After so many measurements in a row without progress, predictions of it are no longer believed; fewer count in part."""
_BOUND_SPREADS = 1.0
"""Within a group, configurations compete by bounds that lie so many spreads below their median cost."""
_FITS = 0.98
"""Least probability to fit of what is measured."""
_MOST_REFUSED = 2
_LONGEST_STEPS, _LEAST_S, _BUILD_S = 70, 6.0, 30.0
_NEED_SMALLEST = "You may need to specify a configuration which can successfully run with train_micro_batch_size_per_gpu = 1."


class PredictSearch:
    """Measures what should gain most over the best, until gains are small.

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
        self._barred_groups: set[tuple[Any, ...]] = set()
        self._tried: set[tuple[Any, ...]] = set()
        self._proposals = Proposals(self.structures, self.forecaster, self._may_measure)
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
        """Return the whole state as JSON values, and what a report says of it."""
        facts = self.report_facts()
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
            "starts": [self.space.candidate(one, 0).to_json() for one in self._proposals.starts()],
            "forecasts": {str(trial_id): forecast for trial_id, forecast in facts.forecasts.items()},
            "explained": {str(trial_id): parts for trial_id, parts in facts.explained.items()},
            "margins": facts.margins,
            "factors": dict(self.forecaster.time.factors()),
            "left": facts.left,
        }

    def report_facts(self) -> ReportFacts:
        """Return predictions, and what they say of the own and the best configuration."""
        best = self.incumbent()
        return ReportFacts(
            forecasts=dict(self._forecasts),
            explained=explained(self.known, best, self.forecaster),
            margins=margins(self.known, best, self.forecaster),
            left=[
                {"description": self.space.describe(one), "candidate": one.to_json(), "gain": gain}
                for one, gain in self._left
            ],
        )

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
            self._barred.add(structure_of(candidate))
            group = self.structures.group(structure_of(candidate))
            of_group = [one for one in self._barred if self.structures.group(one) == group]
            if len(of_group) >= _MOST_REFUSED and not self._has_run(group):
                self._barred_groups.add(group)

    def _has_run(self, group: tuple[Any, ...]) -> bool:
        return any(
            isinstance(known.outcome, Measured)
            and self.structures.group(structure_of(known.candidate)) == group
            for known in self.known.values()
        )

    def incumbent(self) -> tuple[Candidate, float] | None:
        """Return the best measured configuration and its cost; None before anything ran."""
        return incumbent(self.known, self.forecaster)

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
        best = incumbent_smoothed(self.known, self.forecaster)
        time = self.forecaster.supposing(is_open)
        self._tried = {
            self._sameness(known.candidate) for known in self.known.values() if self._is_tried(known)
        }
        while True:
            ranked = self._ranked(best, time)
            if not ranked:
                return self._without_forecast(best, is_open)
            forecast, gain = ranked[0]
            if best is not None and gain < _LEAST_GAIN:
                return None
            verdict = self.gates.check(forecast.candidate, list(self.known.values()))
            if verdict is None:
                return self._measure(forecast.candidate, self._why(forecast, best), forecast)
            self._skipped.add(forecast.candidate)
            if verdict.kind in ("illegal", "hopeless"):
                actions.append(Skip(forecast.candidate, verdict.reason))

    def _ranked(self, best: tuple[Candidate, float] | None, time: TimeModel) -> list[tuple[Forecast, float]]:
        """Return candidates and their expected gains, the most promising first."""
        measured = [known.candidate for known in self.known.values() if isinstance(known.outcome, Measured)]

        def found(fits: float, num_spreads: float) -> list[Proposal]:
            return self._proposals.find(
                self._positions(),
                fits=fits,
                num_spreads=num_spreads,
                time=time,
                measured=measured,
                cost=None if best is None else best[1],
            )

        if best is None:
            # Nothing ran so far: what most probably fits, and of those what is fastest.
            fitting = [(one.forecast, -one.forecast.cost) for one in found(_FITS, 0.0)] or [
                (one.forecast, one.forecast.probability_to_fit) for one in found(0.0, 0.0)
            ]
            return sorted(fitting, key=lambda pair: -pair[1])
        # Predictions that were often disappointed are believed less.
        believed = max(0.0, 1 - num_disappointed(self._order, self.known, self.forecaster) / _PATIENCE)
        proposals = found(_FITS, _BOUND_SPREADS)

        def sorted_by_gain(*, is_risk: bool) -> list[tuple[Forecast, float]]:
            some = [one for one in proposals if one.is_risk == is_risk]
            pairs = [(one.forecast, believed * one.gain(best[1])) for one in some]
            return sorted(pairs, key=lambda pair: -pair[1])

        ranked = sorted_by_gain(is_risk=False)
        if not ranked or ranked[0][1] < _LEAST_GAIN:
            ranked = sorted_by_gain(is_risk=True) or ranked
        self._left = [(one.candidate, best[1] / one.bound(_BOUND_SPREADS) - 1) for one, _ in ranked[:10]]
        return ranked

    def _may_measure(self, candidate: Candidate) -> bool:
        structure = structure_of(candidate)
        return (
            candidate not in self._skipped
            and structure not in self._barred
            and self.structures.group(structure) not in self._barred_groups
            and self._sameness(candidate) not in self._tried
            and not self._is_too_large_for_host(candidate)
        )

    def _positions(self) -> Sequence[int]:
        """Return the positions of the ladder that are considered."""
        is_known = bool(self.forecaster.inputs.runs)
        is_limited = not self.space.ladder.is_free or self.forecaster.capacity_bytes is not None
        ran = [one.candidate.batch for one in self.known.values() if isinstance(one.outcome, Measured)]
        return positions(self.space) if is_known and is_limited else positions_near(self.space, ran)

    def _without_forecast(
        self, best: tuple[Candidate, float] | None, is_open: Sequence[Candidate]
    ) -> Measure | None:
        """Try the user's structure with the smallest micro batch, without predictions."""
        smallest = self.space.smallest()
        is_smaller = smallest.batch.micro_batch_size < self.space.own().batch.micro_batch_size
        if best is not None or is_open or not is_smaller or len(self.known) > 1:
            return None
        return self._measure(smallest, "your structure with the smallest micro batch")

    def _sameness(self, candidate: Candidate) -> tuple[Any, ...]:
        structure = structure_of(candidate)
        return self.structures.setup(structure), self.structures.unset(structure), candidate.batch

    @staticmethod
    def _is_tried(known: Known) -> bool:
        return not (isinstance(known.outcome, Failure) and known.outcome.kind is FailureKind.COMMUNICATION)

    def _is_too_large_for_host(self, candidate: Candidate) -> bool:
        limit = self._host_limit_bytes
        return limit is not None and limit > 0 and self.forecaster.host_bytes(candidate) >= limit

    @staticmethod
    def _why(forecast: Forecast, best: tuple[Candidate, float] | None) -> str:
        if best is None:
            return "predicted to fit" if forecast.probability_to_fit >= _FITS else "the smallest prediction"
        likely, bound = best[1] / forecast.cost - 1, best[1] / forecast.bound(2.0) - 1
        return f"predicted {likely:+.1%}, at best {bound:+.1%}"

    def _measure(self, candidate: Candidate, why: str, forecast: Forecast | None = None) -> Measure:
        trial_id = len(self.known) + 1
        if forecast is None:
            forecast = next(iter(self.forecaster.forecasts([candidate])), None)
        self.known[trial_id] = Known(candidate, None)
        predicted_s = None
        if forecast is not None:
            is_guess = self.forecaster.machine is None and self.incumbent() is None
            self._forecasts[trial_id] = {**self.forecaster.explain(forecast), "is_guess": is_guess}
            if self.incumbent() is not None:
                predicted_s = _BUILD_S + max(_LONGEST_STEPS * forecast.time.quantile(2.0), _LEAST_S)
        return Measure(trial_id, candidate, why, predicted_s)

    def _reason(self) -> str:
        if self.incumbent() is None:
            failed = [one.outcome for one in self.known.values() if isinstance(one.outcome, Failure)]
            last = failed[-1].kind.value if failed else "nothing was measured"
            return f"nothing could be measured ({last}). {_NEED_SMALLEST}"
        return "nothing left is expected to be better by much"

    def _finish(self, reason: str) -> list[Action]:
        self._is_finished = True
        return [Finish(reason, self.incumbent() is None)]

    def _sorted_skipped(self) -> list[Candidate]:
        return sorted(self._skipped, key=lambda one: repr(dataclasses.astuple(one)))


PREDICT = MethodEntry(
    "predict",
    "dry-run and predict, then measure only what may be best (the default method)",
    PredictSearch,
    zero_stages=(0, 1, 2, 3),
    predicts=True,
)
