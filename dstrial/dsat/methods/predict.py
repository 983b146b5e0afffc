"""Method ``predict``: measure only configurations that are predicted to be fast."""

from __future__ import annotations

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

_USUAL, _THOROUGH = (0.0010, 2.0), (0.0008, 3.0)
"""Least expected gain of a measurement, as a share of the best cost, and the number of measurements without progress that
doubles it."""
_CONTENDERS, _REPEATS = 3, 2  # ``--thorough``: configurations to repeat, most measurements of each
_NEW, _FAR = 2.0, 2.0
"""``_NEW`` multiplies the worth of a measurement if its group has not run with a micro batch within a factor of ``_FAR``,
because such a measurement improves the predictions of many candidates."""
_PROGRESS = 1.005  # a cost makes progress if it is better than the best so far by this factor
_SURE_TO_FIT = 0.98  # while nothing has run, a candidate with this probability counts as fitting
_MAX_REFUSED = 2  # failed configurations after which their group is excluded
# After these failures, an equal candidate may be measured: smaller buckets may fit, although nothing else differs.
_MAY_REPEAT = (FailureKind.COMMUNICATION, FailureKind.DEVICE_OOM)
# Most steps of a measurement, least seconds of all steps, seconds of building an engine.
_LONGEST_STEPS, _MIN_S, _BUILD_S = 70, 6.0, 30.0
_NEXT_SIZES = 2  # larger micro batches whose missing memory is reported
_NUM_LEFT = 10  # unmeasured candidates that are reported
_USUAL_NOISE = 0.01  # relative noise of a measurement without a confidence interval

_Costs = list[tuple[Candidate, float]]
"""Measurements of candidates that DeepSpeed cannot tell apart."""


class PredictSearch:
    """Measures the user's configuration, then those with the largest expected gains.

    The search ends when expected gains are small.
    """

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
        self._forecasts: dict[int, dict[str, Any]] = {}  # trial -> prediction before it was measured
        self._left: list[tuple[Candidate, float]] = []  # unmeasured candidates and likely gains
        self._refused: set[Structure] = set()
        self._refused_groups: set[tuple[Any, ...]] = set()
        self._skipped: set[Candidate] = set()
        self._acquisition = Acquisition(self.groups, self.predictor)
        self._host_limit_bytes: float | None = None  # fewest host bytes that ran out of memory
        self._is_finished = False

    # ---- the contract of a method ----------------------------------------------------------------

    def start(self) -> list[Action]:
        notes = map(Note, self.predictor.inputs.notes)
        return [*notes, self._measure(self.space.own(), "your configuration")]

    def on_result(self, trial_id: int, outcome: Outcome) -> list[Action]:
        if self._is_finished:
            return []
        candidate = self.observations[trial_id].candidate
        self.observations[trial_id] = Observation(candidate, outcome)
        self.predictor.learn(candidate, outcome)
        notes: list[Action] = []
        if isinstance(outcome, Measured):
            if candidate.is_own and self.predictor.info is not None:
                notes += map(Note, log_lines(self.predictor.info, self.space))
        elif outcome.kind.ends_search:
            return self._finish(f"{outcome.kind.value}: {outcome.message}")
        else:
            self._learn_failure(candidate, outcome.kind)
        return [*notes, *self._fill()]

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
        """Yield the device bytes that a trial's configuration lacks for larger batches.

        One item for each of the next larger micro batch sizes. A negative number of missing bytes means that memory is left. If
        the trial ran out of memory, the trial's own micro batch is the first one yielded.
        """
        outcome, sizes = observation.outcome, self.space.batch_size_grid
        if outcome is None:
            return
        at = sizes.position(observation.candidate.batch.micro_batch_size)
        is_oom = isinstance(outcome, Failure) and outcome.kind is FailureKind.DEVICE_OOM
        larger = range(at + (not is_oom), min(at + 1 + _NEXT_SIZES, sizes.last + 1))
        structure = structure_of(observation.candidate)
        for one in self.predictor.predictions([self.space.candidate(structure, at) for at in larger]):
            margin = self.predictor.margin_bytes(one.candidate)
            if margin is not None and one.memory is not None:
                yield {
                    "trial_id": trial_id,
                    "micro_batch_size": one.candidate.batch.micro_batch_size,
                    "missing_bytes": -margin,
                    "phase": one.memory.phase,
                }

    # ---- learning --------------------------------------------------------------------------------

    def _learn_failure(self, candidate: Candidate, kind: FailureKind) -> None:
        """Exclude the failed configuration's settings from the search.

        After repeated failures in a group (stage, offloading, settings of unknown effect), the group is excluded if no
        configuration of the group has run. Out-of-memory errors and a first communication error exclude nothing.
        """
        if kind is FailureKind.HOST_OOM:
            needed = self.predictor.host_bytes(candidate)
            self._host_limit_bytes = min(needed, self._host_limit_bytes or needed)
        if kind.is_out_of_memory:
            return
        failed = [one for one in self.observations.values() if isinstance(one.outcome, Failure)]
        if kind is FailureKind.COMMUNICATION and sum(one.candidate == candidate for one in failed) == 1:
            return
        self._refused.add(structure_of(candidate))
        group = self._group(candidate)
        has_run = any(self._group(one) == group for one in self._measured())
        num_refused = sum(self.groups.group(one) == group for one in self._refused)
        if num_refused >= _MAX_REFUSED and not has_run:
            self._refused_groups.add(group)

    def measured_costs(self) -> dict[tuple[Any, ...], _Costs]:
        """Return identity of a candidate -> [(candidate, cost)], one per measurement.

        Candidates that DeepSpeed cannot tell apart have the same identity. Costs are those of ``Predictor.cost``.
        """
        found: dict[tuple[Any, ...], _Costs] = {}
        for one in self.observations.values():
            cost = self.predictor.cost(one.candidate, one.outcome)
            if cost is not None:
                found.setdefault(self._identity(one.candidate), []).append((one.candidate, cost))
        return found

    def incumbent(self) -> tuple[Candidate, float] | None:
        """Return the best configuration and its mean cost; None before any has run."""
        means = [(many[0][0], _mean_cost(many)) for many in self.measured_costs().values()]
        return min(means, key=lambda pair: pair[1], default=None)

    def _num_since_progress(self) -> int:
        """Return the number of measurements since the best cost last improved by 0.5 %."""
        # Not counted: each group's first measurement (group: stage, offloading, settings of unknown effect).
        number, best = 0, math.inf
        groups: set[tuple[Any, ...]] = set()
        for candidate, outcome in self.predictor.outcomes:
            cost, group = self.predictor.cost(candidate, outcome), self._group(candidate)
            if cost is not None and cost * _PROGRESS < best:
                number, best = 0, cost
            elif group in groups:
                number += 1
            groups.add(group)
        return number if best < math.inf else 0

    def _measured(self) -> list[Candidate]:
        return [one.candidate for one in self.observations.values() if isinstance(one.outcome, Measured)]

    def _group(self, candidate: Candidate) -> tuple[Any, ...]:
        return self.groups.group(structure_of(candidate))

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
        """Return the next measurement, or None; append skipped candidates to ``actions``."""
        best = self.incumbent()
        for prediction in self._ranked(best, is_open):
            candidate = prediction.candidate
            rejection = self.filters.check(candidate, list(self.observations.values()))
            if rejection is None:
                return self._measure(candidate, _why(prediction, best), prediction)
            self._skipped.add(candidate)
            if rejection.kind in ("illegal", "hopeless"):
                actions.append(Skip(candidate, rejection.reason))
        return None

    def _ranked(self, best: tuple[Candidate, float] | None, is_open: Sequence[Candidate]) -> list[Prediction]:
        """Return the candidates worth a measurement, the largest expected gain first."""
        found = self._acquisition.candidates(
            self._positions(),
            self.predictor.fantasize(is_open),
            self._measured(),
            None if best is None else best[1],
        )
        if best is None:
            # Nothing has run yet: choose by the probability to fit, then by speed.
            sure = [one for one in found if one.probability_to_fit >= _SURE_TO_FIT]
            pairs = [(one, -one.cost if sure else one.probability_to_fit) for one in sure or found]
        else:
            # The best of many noisy measurements is biased, so a higher predicted cost replaces it.
            known = self.predictor.predictions([best[0]])
            cost = max(best[1], known[0].cost) if known else best[1]
            # The required gain grows with the number of measurements without progress.
            least, patience = _THOROUGH if self.options.thorough else _USUAL
            least *= 2 ** (self._num_since_progress() / patience)
            pairs = [pair for pair in self._worths(found, cost) if pair[1] >= least]
        tried = {
            self._identity(one.candidate)
            for one in self.observations.values()
            if not isinstance(one.outcome, Failure) or one.outcome.kind not in _MAY_REPEAT
        }
        pairs.sort(key=lambda pair: -pair[1])
        ranked = [one for one, _ in pairs if self._may_measure(one.candidate, tried)]
        if best is not None:
            self._left = [
                (one.candidate, cost / one.lower_confidence_bound(1.0) - 1) for one in ranked[:_NUM_LEFT]
            ]
        return ranked

    def _worths(self, found: Sequence[Prediction], cost: float) -> Iterator[tuple[Prediction, float]]:
        failures = [one.outcome for one in self.observations.values() if isinstance(one.outcome, Failure)]
        num_failed = sum(failure.kind is FailureKind.DEVICE_OOM for failure in failures)
        sizes: dict[tuple[Any, ...], list[int]] = {}
        for one in self._measured():
            sizes.setdefault(self._group(one), []).append(one.batch.micro_batch_size)
        for prediction in found:
            candidate = prediction.candidate
            size, near = candidate.batch.micro_batch_size, sizes.get(self._group(candidate), [])
            is_new = all(max(size, one) > _FAR * min(size, one) for one in near)
            yield prediction, (_NEW if is_new else 1.0) * worth(prediction, cost, num_failed)

    def _may_measure(self, candidate: Candidate, tried: set[tuple[Any, ...]]) -> bool:
        limit = self._host_limit_bytes
        return (
            candidate not in self._skipped
            and structure_of(candidate) not in self._refused
            and self._group(candidate) not in self._refused_groups
            and self._identity(candidate) not in tried
            and not (limit and self.predictor.host_bytes(candidate) >= limit)
        )

    def _positions(self) -> Sequence[int]:
        if not self.space.batch_size_grid.is_free or self.predictor.capacity_bytes is not None:
            return positions(self.space)
        return positions_near(self.space, [one.batch for one in self._measured()])

    def _repeated(self, is_open: Sequence[Candidate]) -> Measure | None:
        """Return a repeated measurement of one of the best candidates, or None."""
        measured = self.measured_costs()
        # Failures count, too, so that a contender that fails is not measured forever.
        num_tried = Counter(self._identity(one.candidate) for one in self.observations.values())
        num_repeats = sum(num_tried[identity] - 1 for identity in measured)
        many = sorted(measured.values(), key=_mean_cost)[:_CONTENDERS]
        if is_open or not many or not self.options.thorough or num_repeats >= _CONTENDERS * (_REPEATS - 1):
            return None
        unsure = [one for one in many[1:] if not self._are_separate(many[0], one)]
        contenders = [one[0][0] for one in (many[0], *unsure)]
        fewest = min(contenders, key=lambda one: num_tried[self._identity(one)])
        if not unsure or num_tried[self._identity(fewest)] >= _REPEATS:
            return None
        return self._measure(fewest, f"one of the best {len(unsure) + 1}, which noise does not separate")

    def _are_separate(self, best: _Costs, other: _Costs) -> bool:
        """Return whether two mean costs differ by more than two standard errors."""
        widths = [
            one.outcome.value("half_width") or 1.96 * _USUAL_NOISE
            for one in self.observations.values()
            if isinstance(one.outcome, Measured)
        ]
        deviation = statistics.median(widths) / 1.96 * math.sqrt(1 / len(best) + 1 / len(other))
        return _mean_cost(other) / _mean_cost(best) - 1 > 2 * deviation

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


def _why(prediction: Prediction, best: tuple[Candidate, float] | None) -> str:
    if best is None:
        is_sure = prediction.probability_to_fit >= _SURE_TO_FIT
        return "predicted to fit" if is_sure else "the smallest prediction"
    likely, bound = best[1] / prediction.cost - 1, best[1] / prediction.lower_confidence_bound(2.0) - 1
    return f"predicted {likely:+.1%}, at best {bound:+.1%}"


def _mean_cost(costs: _Costs) -> float:
    return statistics.mean(cost for _, cost in costs)


PREDICT = MethodEntry(
    "predict",
    "predict all configurations from dry runs, measure only those that may be best (the default method)",
    PredictSearch,
    (Flag("--thorough", bool, False, "use up to twice as many trials, to find smaller gains, too", None),),
    zero_stages=(0, 1, 2, 3),
    predicts=True,
)
