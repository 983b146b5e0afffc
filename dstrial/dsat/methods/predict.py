"""``predict``: measure the user's own, then what may be best, while any may. Pure."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from dstrial.dsat.core.candidate import Candidate
from dstrial.dsat.core.outcome import Failure, FailureKind, Measured, Outcome
from dstrial.dsat.methods.base import (
    NEED_SMALLEST,
    Action,
    Finish,
    Flag,
    Measure,
    MethodEntry,
    MethodOptions,
    Note,
    ReportFacts,
    Skip,
)
from dstrial.dsat.predictor.acquisition import Acquisition, worth
from dstrial.dsat.predictor.config_groups import ConfigGroups, positions, positions_near, structure_of
from dstrial.dsat.predictor.inputs import PredictInputs, log_lines
from dstrial.dsat.predictor.predictor import Prediction, Predictor
from dstrial.dsat.space.filters import Filters, Observation
from dstrial.dsat.space.space import Space, Structure


@dataclasses.dataclass(frozen=True, slots=True)
class _Effort:
    """When a search ends."""

    least_worth: float  # expected gain of a measurement, as a share of the best cost
    patience: float  # so many measurements in a row without progress double it
    most_contenders: int  # measured again before the search ends
    most_repeats: int  # measurements of a contender


_USUAL = _Effort(least_worth=0.0012, patience=2.0, most_contenders=0, most_repeats=1)
_THOROUGH = _Effort(least_worth=0.0008, patience=3.0, most_contenders=3, most_repeats=2)
_NEW, _FAR = 2.0, 2.0
"""Worth of a measurement, times what it gains itself, where none of its group has run with a micro batch within a factor of
``_FAR``: it tells about many others."""
_PROGRESS = 1.005  # better than the best so far by less is no progress
_SURE_TO_FIT = 0.98  # probability, while nothing has run
_MAX_REFUSED = 2
_MAY_REPEAT = (
    FailureKind.COMMUNICATION,
    FailureKind.DEVICE_OOM,
)  # smaller buckets may fit, although they differ in nothing else
_LONGEST_STEPS, _MIN_S, _BUILD_S = 70, 6.0, 30.0
_NEXT_SIZES = 2
_USUAL_NOISE = 0.01  # relative, of a measurement whose interval is unknown

_Costs = list[tuple[Candidate, float]]
"""Measurements of candidates that DeepSpeed cannot tell apart."""


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
        self._effort = _THOROUGH if options.thorough else _USUAL
        self._order: list[int] = []  # trials in the order in which they ended
        self._forecasts: dict[int, dict[str, Any]] = {}
        self._left: list[tuple[Candidate, float]] = []
        self._barred: set[Structure] = set()
        self._barred_groups: set[tuple[Any, ...]] = set()
        self._skipped: set[Candidate] = set()
        self._acquisition = Acquisition(self.groups, self.predictor)
        self._host_limit_bytes: float | None = None
        self._is_finished = False

    # ---- the contract ----------------------------------------------------------------------------

    def start(self) -> list[Action]:
        actions: list[Action] = [Note(text) for text in self.predictor.inputs.notes]
        return [*actions, self._measure(self.space.own(), "your configuration")]

    def on_result(self, trial_id: int, outcome: Outcome) -> list[Action]:
        if self._is_finished:
            return []
        candidate = self.observations[trial_id].candidate
        self._learn(trial_id, candidate, outcome)
        if isinstance(outcome, Failure) and outcome.kind.ends_search:
            return self._finish(f"{outcome.kind.value}: {outcome.message}")
        actions: list[Action] = []
        if candidate.is_own and isinstance(outcome, Measured) and self.predictor.info is not None:
            actions += map(Note, log_lines(self.predictor.info, self.space))
        return [*actions, *self._fill()]

    def report_facts(self) -> ReportFacts:
        best = self.incumbent()
        shown = [
            (trial_id, one)
            for trial_id, one in self.observations.items()
            if one.candidate.is_own or (best is not None and one.candidate == best[0])
        ]
        return ReportFacts(
            forecasts=dict(self._forecasts),
            explained={
                trial_id: parts
                for trial_id, one in shown
                if isinstance(one.outcome, Measured) and (parts := self.predictor.parts(one.candidate))
            },
            margins=[margin for trial_id, one in shown for margin in self._margins(trial_id, one)],
            left=[
                {"description": self.space.describe(one), "candidate": one.to_json(), "gain": gain}
                for one, gain in self._left
            ],
        )

    def _margins(self, trial_id: int, observation: Observation) -> Iterator[dict[str, Any]]:
        """Yield the bytes that larger micro batches lack, and its own if it failed."""
        if observation.outcome is None:
            return
        ladder, outcome = self.space.batch_size_grid, observation.outcome
        at = ladder.position(observation.candidate.batch.micro_batch_size)
        has_run_out = isinstance(outcome, Failure) and outcome.kind is FailureKind.DEVICE_OOM
        for position in range(at + (not has_run_out), min(at + 1 + _NEXT_SIZES, ladder.last + 1)):
            one = self.space.candidate(structure_of(observation.candidate), position)
            margin, memory = self.predictor.margin_bytes(one), self.predictor.memory_of(one)
            if margin is not None and memory is not None:
                yield {
                    "trial_id": trial_id,
                    "micro_batch_size": one.batch.micro_batch_size,
                    "missing_bytes": -margin,
                    "phase": memory.phase,
                }

    # ---- learning --------------------------------------------------------------------------------

    def _learn(self, trial_id: int, candidate: Candidate, outcome: Outcome) -> None:
        self.observations[trial_id] = Observation(candidate, outcome)
        self._order.append(trial_id)
        self.predictor.learn(candidate, outcome)
        if not isinstance(outcome, Failure) or outcome.kind is FailureKind.DEVICE_OOM:
            return
        if outcome.kind is FailureKind.HOST_OOM:
            needed = self.predictor.host_bytes(candidate)
            self._host_limit_bytes = min(needed, self._host_limit_bytes or needed)
            return
        num_failed = sum(
            one.candidate == candidate and isinstance(one.outcome, Failure)
            for one in self.observations.values()
        )
        if outcome.kind is FailureKind.COMMUNICATION and num_failed == 1:
            return
        self._barred.add(structure_of(candidate))
        group = self._group(candidate)
        has_run = any(
            isinstance(one.outcome, Measured) and self._group(one.candidate) == group
            for one in self.observations.values()
        )
        num_barred = sum(self.groups.group(one) == group for one in self._barred)
        if num_barred >= _MAX_REFUSED and not has_run:
            self._barred_groups.add(group)

    def _group(self, candidate: Candidate) -> tuple[Any, ...]:
        return self.groups.group(structure_of(candidate))

    def measured_costs(self) -> dict[tuple[Any, ...], _Costs]:
        """Return identity -> measurements of candidates that DeepSpeed cannot tell apart."""
        found: dict[tuple[Any, ...], _Costs] = {}
        for one in self.observations.values():
            cost = self.predictor.cost(one.candidate, one.outcome)
            if cost is not None:
                found.setdefault(self._identity(one.candidate), []).append((one.candidate, cost))
        return found

    def incumbent(self) -> tuple[Candidate, float] | None:
        """Return the best configuration and its mean cost; None before anything ran."""
        means = [(many[0][0], _mean_cost(many)) for many in self.measured_costs().values()]
        return min(means, key=lambda pair: pair[1], default=None)

    def _num_since_progress(self) -> int:
        """Return how many last measurements brought no progress.

        The first of a group is none of them.
        """
        number, best = 0, math.inf
        groups: set[tuple[Any, ...]] = set()
        for trial_id in self._order:
            one = self.observations[trial_id]
            cost, group = self.predictor.cost(one.candidate, one.outcome), self._group(one.candidate)
            if cost is not None and cost * _PROGRESS < best:
                number, best = 0, cost
            elif group in groups:
                number += 1
            groups.add(group)
        return number if best < math.inf else 0

    def _identity(self, candidate: Candidate) -> tuple[Any, ...]:
        return self.groups.identity(candidate, self.predictor.num_params)

    # ---- choosing --------------------------------------------------------------------------------

    def _fill(self) -> list[Action]:
        actions: list[Action] = []
        while True:
            is_open = [one.candidate for one in self.observations.values() if one.outcome is None]
            if len(self.observations) >= self.options.max_trials:
                if is_open:
                    return actions
                return [*actions, *self._finish(f"all {len(self.observations)} trials completed")]
            if len(is_open) >= self.options.num_parallel:
                return actions
            chosen = self._choose(is_open, actions) or self._repeated(is_open)
            if chosen is None:
                return actions if is_open else [*actions, *self._finish(self._reason())]
            actions.append(chosen)

    def _choose(self, is_open: Sequence[Candidate], actions: list[Action]) -> Measure | None:
        """Return the next measurement; append skipped candidates to ``actions``."""
        best = self.incumbent()
        for prediction in self._ranked(best, is_open):
            verdict = self.filters.check(prediction.candidate, list(self.observations.values()))
            if verdict is None:
                return self._measure(prediction.candidate, self._why(prediction, best), prediction)
            self._skipped.add(prediction.candidate)
            if verdict.kind in ("illegal", "hopeless"):
                actions.append(Skip(prediction.candidate, verdict.reason))
        return self._smallest(best, is_open)

    def _ranked(self, best: tuple[Candidate, float] | None, is_open: Sequence[Candidate]) -> list[Prediction]:
        """Return the candidates whose measurements are worth it, the most promising first."""
        measured = [one.candidate for one in self.observations.values() if isinstance(one.outcome, Measured)]
        tried = {
            self._identity(one.candidate)
            for one in self.observations.values()
            if not isinstance(one.outcome, Failure) or one.outcome.kind not in _MAY_REPEAT
        }
        found = self._acquisition.candidates(
            self._positions(), self.predictor.fantasize(is_open), measured, None if best is None else best[1]
        )
        if best is None:
            # Nothing has run yet: choose by the probability to fit, then by speed.
            sure = [one for one in found if one.probability_to_fit >= _SURE_TO_FIT]
            pairs = [(one, -one.cost if sure else one.probability_to_fit) for one in sure or found]
        else:
            # The best of many measurements is in part the luckiest one.
            known = self.predictor.predictions([best[0]])
            cost = max(best[1], known[0].cost) if known else best[1]
            # Predictions that disappointed are believed less and less.
            least = self._effort.least_worth * 2 ** (self._num_since_progress() / self._effort.patience)
            pairs = [pair for pair in self._worths(found, measured, cost) if pair[1] >= least]
        ranked = [
            pair
            for pair in sorted(pairs, key=lambda pair: -pair[1])
            if self._may_measure(pair[0].candidate, tried)
        ]
        if best is not None:
            self._left = [
                (one.candidate, cost / one.lower_confidence_bound(1.0) - 1) for one, _ in ranked[:10]
            ]
        return [one for one, _ in ranked]

    def _worths(
        self, found: Sequence[Prediction], measured: Sequence[Candidate], cost: float
    ) -> Iterator[tuple[Prediction, float]]:
        failures = [one.outcome for one in self.observations.values() if isinstance(one.outcome, Failure)]
        num_failed = sum(failure.kind is FailureKind.DEVICE_OOM for failure in failures)
        sizes: dict[tuple[Any, ...], list[int]] = {}
        for one in measured:
            sizes.setdefault(self._group(one), []).append(one.batch.micro_batch_size)
        for prediction in found:
            candidate = prediction.candidate
            size, near = candidate.batch.micro_batch_size, sizes.get(self._group(candidate), [])
            is_new = all(max(size, one) > _FAR * min(size, one) for one in near)
            yield prediction, (_NEW if is_new else 1.0) * worth(prediction, cost, num_failed)

    def _may_measure(self, candidate: Candidate, tried: set[tuple[Any, ...]]) -> bool:
        return (
            candidate not in self._skipped
            and structure_of(candidate) not in self._barred
            and self._group(candidate) not in self._barred_groups
            and self._identity(candidate) not in tried
            and not self._is_too_large_for_host(candidate)
        )

    def _positions(self) -> Sequence[int]:
        if not self.space.batch_size_grid.is_free or self.predictor.capacity_bytes is not None:
            return positions(self.space)
        ran = [one.candidate.batch for one in self.observations.values() if isinstance(one.outcome, Measured)]
        return positions_near(self.space, ran)

    def _smallest(self, best: tuple[Candidate, float] | None, is_open: Sequence[Candidate]) -> Measure | None:
        """Return the user's structure with the smallest micro batch, unpredicted."""
        smallest = self.space.smallest()
        is_smaller = smallest.batch.micro_batch_size < self.space.own().batch.micro_batch_size
        if best is not None or is_open or not is_smaller or len(self.observations) > 1:
            return None
        return self._measure(smallest, "your structure with the smallest micro batch")

    def _repeated(self, is_open: Sequence[Candidate]) -> Measure | None:
        """Return another measurement of one of the best until they separate."""
        effort = self._effort
        measured = self.measured_costs()
        # Failures count too, so that a contender that fails is not ordered for ever.
        num_tried = Counter(self._identity(one.candidate) for one in self.observations.values())
        num_repeats = sum(num_tried[identity] - 1 for identity in measured)
        many = sorted(measured.values(), key=_mean_cost)[: effort.most_contenders]
        if is_open or not many or num_repeats >= effort.most_contenders * (effort.most_repeats - 1):
            return None
        unsure = [one for one in many[1:] if not self._are_separate(many[0], one)]
        contenders = [one[0][0] for one in (many[0], *unsure)]
        fewest = min(contenders, key=lambda one: num_tried[self._identity(one)])
        if not unsure or num_tried[self._identity(fewest)] >= effort.most_repeats:
            return None
        return self._measure(fewest, f"one of the best {len(unsure) + 1}, which noise does not separate")

    def _are_separate(self, best: _Costs, other: _Costs) -> bool:
        widths = [
            one.outcome.value("half_width") or 1.96 * _USUAL_NOISE
            for one in self.observations.values()
            if isinstance(one.outcome, Measured)
        ]
        deviation = statistics.median(widths) / 1.96 * math.sqrt(1 / len(best) + 1 / len(other))
        return _mean_cost(other) / _mean_cost(best) - 1 > 2 * deviation

    def _is_too_large_for_host(self, candidate: Candidate) -> bool:
        limit = self._host_limit_bytes
        return limit is not None and limit > 0 and self.predictor.host_bytes(candidate) >= limit

    @staticmethod
    def _why(prediction: Prediction, best: tuple[Candidate, float] | None) -> str:
        if best is None:
            is_sure = prediction.probability_to_fit >= _SURE_TO_FIT
            return "predicted to fit" if is_sure else "the smallest prediction"
        likely, bound = best[1] / prediction.cost - 1, best[1] / prediction.lower_confidence_bound(2.0) - 1
        return f"predicted {likely:+.1%}, at best {bound:+.1%}"

    def _measure(self, candidate: Candidate, why: str, prediction: Prediction | None = None) -> Measure:
        trial_id = len(self.observations) + 1
        prediction = prediction or next(iter(self.predictor.predictions([candidate])), None)
        has_run = self.incumbent() is not None
        self.observations[trial_id] = Observation(candidate, None)
        predicted_s = None
        if prediction is not None:
            is_guess = self.predictor.machine is None and not has_run
            self._forecasts[trial_id] = {**self.predictor.explain(prediction), "is_guess": is_guess}
            if has_run:
                predicted_s = _BUILD_S + max(_LONGEST_STEPS * prediction.time.quantile(2.0), _MIN_S)
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


def _mean_cost(costs: _Costs) -> float:
    return statistics.mean(cost for _, cost in costs)


PREDICT = MethodEntry(
    "predict",
    "dry-run and predict, then measure only what may be best (the default method)",
    PredictSearch,
    (Flag("--thorough", bool, False, "spend up to twice the trials on the last percent", None),),
    zero_stages=(0, 1, 2, 3),
    predicts=True,
)
