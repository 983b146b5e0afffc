"""``predict``: measure the user's own, then what may be best, while any may. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from dstrial.dsat.core.candidate import Candidate
from dstrial.dsat.core.outcome import Failure, FailureKind, Measured, Outcome
from dstrial.dsat.methods.base import (
    NEED_SMALLEST,
    Action,
    Finish,
    Measure,
    MethodEntry,
    MethodOptions,
    Note,
    ReportFacts,
    Skip,
)
from dstrial.dsat.methods.progress import (
    incumbent,
    memory_margins,
    smoothed_incumbent,
    time_breakdowns,
    trials_since_improvement,
)
from dstrial.dsat.predictor.acquisition import Acquisition, Proposal
from dstrial.dsat.predictor.config_groups import ConfigGroups, positions, positions_near
from dstrial.dsat.predictor.predictor import Prediction, Predictor, structure_of
from dstrial.dsat.predictor.profiles import PredictInputs, log_lines
from dstrial.dsat.predictor.step_time import TimeModel
from dstrial.dsat.space.filters import Filters, Observation
from dstrial.dsat.space.space import Space, Structure

_LEAST_IMPROVEMENT = 0.0008
"""The search ends when no measurement is expected to gain more than this; what is worse than the best is not taken."""
_PATIENCE = 12
"""After so many measurements in a row without progress, predictions of it are no longer believed; fewer count in part."""
_BOUND_STDS = 1.0
"""Within a group, configurations compete by bounds that lie so many standard deviations below their median cost."""
_FITS = 0.98
"""Least probability to fit of what is measured."""
_MOST_REFUSED = 2
_LONGEST_STEPS, _LEAST_S, _BUILD_S = 70, 6.0, 30.0


class PredictSearch:
    """Measures what should gain most until gains are small; nothing is random."""

    def __init__(
        self, space: Space, options: MethodOptions, filters: Filters, inputs: PredictInputs | None = None
    ) -> None:
        self.space = space
        self.options = options
        self.filters = filters
        given = inputs or PredictInputs()
        self.groups = ConfigGroups(space, is_cpu=given.is_cpu)
        self.predictor = Predictor(self.groups, given, options.metric)
        self.observations: dict[int, Observation] = {}
        self._order: list[int] = []
        self._forecasts: dict[int, dict[str, Any]] = {}
        self._left: list[tuple[Candidate, float]] = []
        self._barred: set[Structure] = set()
        self._skipped: set[Candidate] = set()
        self._barred_groups: set[tuple[Any, ...]] = set()
        self._tried: set[tuple[Any, ...]] = set()
        self._acquisition = Acquisition(self.groups, self.predictor, self._may_measure)
        self._host_limit_bytes: float | None = None
        self._is_finished = False

    # ---- the contract ----------------------------------------------------------------------------

    def start(self) -> list[Action]:
        actions: list[Action] = [Note(text) for text in self.predictor.inputs.notes]
        return [*actions, self._measure(self.space.own(), "your configuration")]

    def on_result(self, trial_id: int, outcome: Outcome) -> list[Action]:
        if self._is_finished:
            return []
        observation = self.observations[trial_id]
        self._learn(trial_id, outcome)
        if isinstance(outcome, Failure) and outcome.kind in (FailureKind.USER_ERROR, FailureKind.CANCELED):
            return self._finish(f"{outcome.kind.value}: {outcome.message}")
        actions: list[Action] = []
        if observation.candidate.is_own and isinstance(outcome, Measured) and self.predictor.info is not None:
            lines = log_lines(
                self.predictor.info, self.space.stages, self.space.replicas, self.space.bytes_per_value
            )
            actions += [Note(line) for line in lines]
        return [*actions, *self._fill()]

    def snapshot(self) -> dict[str, Any]:
        facts = self.report_facts()
        return {
            "is_finished": self._is_finished,
            "order": list(self._order),
            "known": [
                {"trial_id": trial_id, **observation.to_json()}
                for trial_id, observation in self.observations.items()
            ],
            "skipped": [candidate.to_json() for candidate in self._sorted_skipped()],
            "starts": [self.space.candidate(one, 0).to_json() for one in self._acquisition.starts()],
            "forecasts": {str(trial_id): forecast for trial_id, forecast in facts.forecasts.items()},
            "explained": {str(trial_id): parts for trial_id, parts in facts.explained.items()},
            "margins": facts.margins,
            "factors": dict(self.predictor.time.factors()),
            "left": facts.left,
        }

    def report_facts(self) -> ReportFacts:
        best = self.incumbent()
        return ReportFacts(
            forecasts=dict(self._forecasts),
            explained=time_breakdowns(self.observations, best, self.predictor),
            margins=memory_margins(self.observations, best, self.predictor),
            left=[
                {"description": self.space.describe(one), "candidate": one.to_json(), "gain": gain}
                for one, gain in self._left
            ],
        )

    # ---- learning --------------------------------------------------------------------------------

    def _learn(self, trial_id: int, outcome: Outcome) -> None:
        candidate = self.observations[trial_id].candidate
        self.observations[trial_id] = Observation(candidate, outcome)
        self._order.append(trial_id)
        self.predictor.learn(candidate, outcome)
        if not isinstance(outcome, Failure):
            return
        if outcome.kind is FailureKind.HOST_OOM:
            needed = self.predictor.host_bytes(candidate)
            self._host_limit_bytes = min(needed, self._host_limit_bytes or needed)
        repeated = [
            observation
            for observation in self.observations.values()
            if observation.candidate == candidate and isinstance(observation.outcome, Failure)
        ]
        if not outcome.kind.is_out_of_memory and (
            outcome.kind is not FailureKind.COMMUNICATION or len(repeated) > 1
        ):
            self._barred.add(structure_of(candidate))
            group = self.groups.group(structure_of(candidate))
            of_group = [one for one in self._barred if self.groups.group(one) == group]
            if len(of_group) >= _MOST_REFUSED and not self._has_run(group):
                self._barred_groups.add(group)

    def _has_run(self, group: tuple[Any, ...]) -> bool:
        return any(
            isinstance(observation.outcome, Measured)
            and self.groups.group(structure_of(observation.candidate)) == group
            for observation in self.observations.values()
        )

    def incumbent(self) -> tuple[Candidate, float] | None:
        return incumbent(self.observations, self.predictor)

    # ---- choosing --------------------------------------------------------------------------------

    def _fill(self) -> list[Action]:
        actions: list[Action] = []
        while True:
            is_open = [
                observation.candidate
                for observation in self.observations.values()
                if observation.outcome is None
            ]
            if len(self.observations) >= self.options.max_trials:
                if is_open:
                    return actions
                return [*actions, *self._finish(f"all {len(self.observations)} trials completed")]
            if len(is_open) >= self.options.num_parallel:
                return actions
            chosen = self._choose(is_open, actions)
            if chosen is None:
                if is_open:
                    return actions
                return [*actions, *self._finish(self._reason())]
            actions.append(chosen)

    def _choose(self, is_open: Sequence[Candidate], actions: list[Action]) -> Measure | None:
        """Return the next measurement; append skipped candidates to ``actions``."""
        best = smoothed_incumbent(self.observations, self.predictor)
        time = self.predictor.fantasize(is_open)
        self._tried = {
            self._dedup_key(observation.candidate)
            for observation in self.observations.values()
            if self._is_tried(observation)
        }
        while True:
            ranked = self._ranked(best, time)
            if not ranked:
                return self._without_forecast(best, is_open)
            forecast, gain = ranked[0]
            if best is not None and gain < _LEAST_IMPROVEMENT:
                return None
            verdict = self.filters.check(forecast.candidate, list(self.observations.values()))
            if verdict is None:
                return self._measure(forecast.candidate, self._why(forecast, best), forecast)
            self._skipped.add(forecast.candidate)
            if verdict.kind in ("illegal", "hopeless"):
                actions.append(Skip(forecast.candidate, verdict.reason))

    def _ranked(
        self, best: tuple[Candidate, float] | None, time: TimeModel
    ) -> list[tuple[Prediction, float]]:
        """Return candidates and their expected gains, the most promising first."""
        measured = [
            observation.candidate
            for observation in self.observations.values()
            if isinstance(observation.outcome, Measured)
        ]

        def found(fits: float, num_stds: float) -> list[Proposal]:
            return self._acquisition.find(
                self._positions(),
                fits=fits,
                num_stds=num_stds,
                time=time,
                measured=measured,
                cost=None if best is None else best[1],
            )

        if best is None:
            # Nothing has run yet: choose by the probability to fit, then by speed.
            fitting = [(one.prediction, -one.prediction.cost) for one in found(_FITS, 0.0)] or [
                (one.prediction, one.prediction.probability_to_fit) for one in found(0.0, 0.0)
            ]
            return sorted(fitting, key=lambda pair: -pair[1])
        # Predictions that often disappointed are discounted.
        believed = max(
            0.0, 1 - trials_since_improvement(self._order, self.observations, self.predictor) / _PATIENCE
        )
        proposals = found(_FITS, _BOUND_STDS)

        def sorted_by_gain(*, is_risk: bool) -> list[tuple[Prediction, float]]:
            some = [one for one in proposals if one.is_risk == is_risk]
            pairs = [(one.prediction, believed * one.expected_improvement(best[1])) for one in some]
            return sorted(pairs, key=lambda pair: -pair[1])

        ranked = sorted_by_gain(is_risk=False)
        if not ranked or ranked[0][1] < _LEAST_IMPROVEMENT:
            ranked = sorted_by_gain(is_risk=True) or ranked
        self._left = [
            (one.candidate, best[1] / one.lower_confidence_bound(_BOUND_STDS) - 1) for one, _ in ranked[:10]
        ]
        return ranked

    def _may_measure(self, candidate: Candidate) -> bool:
        structure = structure_of(candidate)
        return (
            candidate not in self._skipped
            and structure not in self._barred
            and self.groups.group(structure) not in self._barred_groups
            and self._dedup_key(candidate) not in self._tried
            and not self._is_too_large_for_host(candidate)
        )

    def _positions(self) -> Sequence[int]:
        is_known = bool(self.predictor.inputs.runs)
        is_limited = not self.space.batch_size_grid.is_free or self.predictor.capacity_bytes is not None
        ran = [one.candidate.batch for one in self.observations.values() if isinstance(one.outcome, Measured)]
        return positions(self.space) if is_known and is_limited else positions_near(self.space, ran)

    def _without_forecast(
        self, best: tuple[Candidate, float] | None, is_open: Sequence[Candidate]
    ) -> Measure | None:
        """Return the user's structure with the smallest micro batch; unpredicted."""
        smallest = self.space.smallest()
        is_smaller = smallest.batch.micro_batch_size < self.space.own().batch.micro_batch_size
        if best is not None or is_open or not is_smaller or len(self.observations) > 1:
            return None
        return self._measure(smallest, "your structure with the smallest micro batch")

    def _dedup_key(self, candidate: Candidate) -> tuple[Any, ...]:
        structure = structure_of(candidate)
        return self.groups.setup(structure), self.groups.settings_beside_setup(structure), candidate.batch

    @staticmethod
    def _is_tried(observation: Observation) -> bool:
        return not (
            isinstance(observation.outcome, Failure) and observation.outcome.kind is FailureKind.COMMUNICATION
        )

    def _is_too_large_for_host(self, candidate: Candidate) -> bool:
        limit = self._host_limit_bytes
        return limit is not None and limit > 0 and self.predictor.host_bytes(candidate) >= limit

    @staticmethod
    def _why(forecast: Prediction, best: tuple[Candidate, float] | None) -> str:
        if best is None:
            return "predicted to fit" if forecast.probability_to_fit >= _FITS else "the smallest prediction"
        likely, bound = best[1] / forecast.cost - 1, best[1] / forecast.lower_confidence_bound(2.0) - 1
        return f"predicted {likely:+.1%}, at best {bound:+.1%}"

    def _measure(self, candidate: Candidate, why: str, forecast: Prediction | None = None) -> Measure:
        trial_id = len(self.observations) + 1
        if forecast is None:
            forecast = next(iter(self.predictor.predictions([candidate])), None)
        self.observations[trial_id] = Observation(candidate, None)
        predicted_s = None
        if forecast is not None:
            is_guess = self.predictor.machine is None and self.incumbent() is None
            self._forecasts[trial_id] = {**self.predictor.explain(forecast), "is_guess": is_guess}
            if self.incumbent() is not None:
                predicted_s = _BUILD_S + max(_LONGEST_STEPS * forecast.time.quantile(2.0), _LEAST_S)
        return Measure(trial_id, candidate, why, predicted_s)

    def _reason(self) -> str:
        if self.incumbent() is None:
            failed = [one.outcome for one in self.observations.values() if isinstance(one.outcome, Failure)]
            last = failed[-1].kind.value if failed else "nothing was measured"
            return f"nothing could be measured ({last}). {NEED_SMALLEST}"
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
