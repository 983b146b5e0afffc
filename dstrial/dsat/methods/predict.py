"""Method ``predict``: measure only configurations that are predicted to be fast.

Configurations of one *group* have the same ZeRO stage and the same offload devices. They also have the same values of those
``--space`` keys whose effect no formula predicts. A *structure* is a configuration without its batch sizes.
docs/explanation/dsat-model.md has the equations.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from dstrial.dsat.core.candidate import Candidate
from dstrial.dsat.core.outcome import TIE, Failure, FailureKind, Measured, Outcome, mean_of
from dstrial.dsat.methods.base import NEED_SMALLEST, Action, Finish, Measure, MethodOptions, Note, Observation
from dstrial.dsat.predictor.config_groups import ConfigGroups, positions, positions_near, structure_of
from dstrial.dsat.predictor.inputs import PredictInputs
from dstrial.dsat.predictor.models import StepModel
from dstrial.dsat.predictor.predictor import Prediction, Predictor
from dstrial.dsat.space import Space, Structure

_USUAL, _THOROUGH = (0.0012, 2.0), (0.0008, 3.0)
"""(least expected gain of a further measurement, as a share of the best cost; number of measurements without progress after
which this gain doubles), without and with ``--thorough``."""
_CONTENDERS = 3  # with ``--thorough``: number of best configurations that are compared again
_MOST = 2  # most measurements of a configuration
_NEW, _FAR = 2.0, 2.0
"""``_NEW`` multiplies the worth of a measurement if its group has not run with a micro batch within a factor of ``_FAR``,
because such a measurement improves the predictions of many candidates."""
_PROGRESS = 1.005  # a measurement is progress if it divides the best cost so far by more than this
_SURE_TO_FIT = 0.98  # probability from which a configuration counts as fitting while nothing has run
_MAX_REFUSED = 2  # number of failed settings after which their group is excluded
# After these failures, an equal candidate may be measured: smaller buckets may fit, although nothing else differs.
_MAY_REPEAT = (FailureKind.COMMUNICATION, FailureKind.DEVICE_OOM)
# To predict the time of a trial: most steps, least seconds of all steps, seconds to build an engine.
_LONGEST_STEPS, _MIN_S, _BUILD_S = 70, 6.0, 30.0

_MAX_CHANGES = 30  # most changes of a descent
_MIN_CHANGE = 1e-4  # of the log cost; a descent ends when no change gains more
_FITS = 0.85  # a descent visits only configurations with at least this probability to fit into memory
_BOUNDS = (1.5, 0.0)
"""A descent compares costs at so many standard deviations below the median: first 1.5, then 0."""
_HOPELESS_STDS, _HOPELESS = 3.0, 1.03
"""A group is left out if its lowest cost, 3 standard deviations below the median, exceeds 1.03 times the best measured cost."""
_OOM_COST = 0.2  # loss by running out of memory, as a share of the best cost
_MIN_TO_FIT = 0.5  # a configuration with a lower probability to fit into memory is worth nothing

_Place = tuple[Prediction, int]  # (prediction, index of its micro batch size among the allowed ones)


class PredictSearch:
    """Measures the user's configuration, then those with the largest expected gains.

    The search ends when the expected gains of all other configurations are small.
    """

    def __init__(self, space: Space, options: MethodOptions, inputs: PredictInputs) -> None:
        self.space = space
        self.options = options
        self.groups = ConfigGroups(space, is_cpu=inputs.is_cpu)
        self.predictor = Predictor(self.groups, inputs, options.metric)
        self.observations: dict[int, Observation] = {}
        self.forecasts: dict[int, Mapping[str, Any]] = {}
        self._refused: set[Structure] = set()
        self._refused_groups: set[tuple[Any, ...]] = set()
        self._acquisition = Acquisition(self.predictor)
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
        if isinstance(outcome, Failure):
            if outcome.kind.ends_search:
                return self._finish(f"{outcome.kind.value}: {outcome.message}")
            self._learn_failure(candidate, outcome.kind)
        return self._fill()

    # ---- learning --------------------------------------------------------------------------------

    def _learn_failure(self, candidate: Candidate, kind: FailureKind) -> None:
        """Exclude the settings of a failed configuration from the search.

        If two settings of a group (see the module's docstring) fail and none has run, the whole group is excluded. A device's
        out-of-memory error excludes nothing; nor does the first communication error of a configuration.
        """
        failed = [one for one in self.observations.values() if isinstance(one.outcome, Failure)]
        is_first = sum(one.candidate == candidate for one in failed) == 1
        if kind is FailureKind.DEVICE_OOM or (kind is FailureKind.COMMUNICATION and is_first):
            return
        self._refused.add(structure_of(candidate))
        group = self._group(candidate)
        has_run = any(self._group(one) == group for one in self._measured())
        num_refused = sum(self.groups.group(one) == group for one in self._refused)
        if num_refused >= _MAX_REFUSED and not has_run:
            self._refused_groups.add(group)

    def _costs(self) -> list[tuple[Candidate, float, float]]:
        """Return (configuration, mean cost, relative half-width of the mean), best first."""
        repeats: dict[Candidate, list[Measured]] = {}
        for one in self.observations.values():
            if isinstance(one.outcome, Measured):
                repeats.setdefault(one.candidate, []).append(one.outcome)
        means = [(candidate, mean_of(many)) for candidate, many in repeats.items()]
        found = [
            (candidate, cost, mean.metrics["half_width"])
            for candidate, mean in means
            if (cost := self.predictor.cost(candidate, mean))
        ]
        return sorted(found, key=lambda one: one[1])

    def incumbent(self) -> tuple[Candidate, float] | None:
        """Return (best measured configuration, its mean cost); None without a measurement."""
        return next(((candidate, cost) for candidate, cost, _ in self._costs()), None)

    def _num_since_progress(self) -> int:
        """Return the number of measurements since the best cost last improved by 0.5 %.

        The first measurement of each group is not counted.
        """
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
            best = self.incumbent()
            chosen = next(iter(self._ranked(best, is_open)), None)
            if chosen is not None:
                actions.append(self._measure(chosen.candidate, _why(chosen, best), chosen))
            elif is_open:
                return actions
            elif (repeated := self._contender()) is not None:
                actions.append(self._measure(repeated, "measured again, because it is one of the best"))
            else:
                return [*actions, *self._finish(self._reason())]

    def _ranked(self, best: tuple[Candidate, float] | None, is_open: Sequence[Candidate]) -> list[Prediction]:
        """Return predictions of the configurations to measure next, the best first.

        ``best`` is the best measured configuration with its cost; ``is_open`` are configurations whose trials still run.
        """
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
        return [one for one, _ in pairs if self._may_measure(one.candidate, tried)]

    def _worths(self, found: Sequence[Prediction], cost: float) -> Iterator[tuple[Prediction, float]]:
        """Yield each prediction of ``found`` with its :func:`worth`.

        The worth is doubled if the group has not run with a similar micro batch. ``cost`` is the best measured cost.
        """
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
        return (
            structure_of(candidate) not in self._refused
            and self._group(candidate) not in self._refused_groups
            and self._identity(candidate) not in tried
        )

    def _positions(self) -> Sequence[int]:
        if not self.space.batch_size_grid.is_free or self.predictor.capacity_bytes is not None:
            return positions(self.space)
        return positions_near(self.space, [one.batch for one in self._measured()])

    def _contender(self) -> Candidate | None:
        """Return one of the best configurations to measure again; None if there is none.

        The best is measured again, because the best of many noisy measurements is often a lucky one. With ``--thorough``, so are
        those of the best three that noise does not separate from the best.
        """
        num_tried = Counter(one.candidate for one in self.observations.values())  # failures, too
        num_repeats = num_tried.total() - len(num_tried)
        num_contenders = _CONTENDERS if self.options.thorough else 1
        costs = self._costs()[:num_contenders]
        if not costs or num_repeats >= num_contenders * (_MOST - 1):
            return None
        unsure = [one for one in costs[1:] if _is_unsure(costs[0], one)]
        chosen = min((candidate for candidate, _, _ in (costs[0], *unsure)), key=num_tried.__getitem__)
        return chosen if num_tried[chosen] < _MOST else None

    def _measure(self, candidate: Candidate, why: str, prediction: Prediction | None = None) -> Measure:
        trial_id = len(self.observations) + 1
        prediction = prediction or next(iter(self.predictor.predictions([candidate])), None)
        has_run = self.incumbent() is not None
        self.observations[trial_id] = Observation(candidate, None)
        predicted_s = None
        if prediction is not None:
            is_guess = self.predictor.machine is None and not has_run
            self.forecasts[trial_id] = self.predictor.forecast(prediction, is_guess=is_guess)
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


def _is_unsure(best: tuple[Candidate, float, float], other: tuple[Candidate, float, float]) -> bool:
    """Return whether more measurements are needed to compare two configurations.

    Each argument is (configuration, mean cost, relative half-width of the mean). More measurements are needed if the 95 %
    interval of the relative difference contains 0 and reaches beyond 1 % (``TIE``).
    """
    difference, half_width = other[1] / best[1] - 1, math.hypot(best[2], other[2])
    return difference - half_width <= 0 and difference + half_width > TIE


# ---- candidates for the next measurement --------------------------------------------------------


def worth(prediction: Prediction, cost: float, num_failed: int = 0) -> float:
    """Return the expected gain of measuring a configuration, minus the expected loss.

    Both are shares of ``cost``, the best measured cost. The loss is that of running out of memory; it grows with ``num_failed``,
    the number of out-of-memory errors so far. Returns 0 if the configuration probably does not fit into memory.
    """
    fits = prediction.probability_to_fit
    if fits < _MIN_TO_FIT:
        return 0.0
    return fits * prediction.expected_improvement(cost) - (1 - fits) * _OOM_COST * (1 + num_failed)


class Acquisition:
    """Finds configurations that may be worth a measurement.

    A coordinate descent runs in each group (see the module's docstring). It changes one setting at a time, and the micro batch
    size, while the predicted cost falls. All configurations that the descents visit are proposed.
    """

    def __init__(self, predictor: Predictor) -> None:
        self._groups, self._predictor = predictor.groups, predictor
        self._ends: dict[tuple[Any, ...], Structure] = {}  # group -> where its last descent ended
        self._seen: dict[Candidate, Prediction] = {}  # what the descents of this call have visited
        self._positions: Sequence[int] = ()
        self._time: StepModel | None = None

    def candidates(
        self,
        positions: Sequence[int],
        time: StepModel,
        measured: Iterable[Candidate],
        cost: float | None,
    ) -> list[Prediction]:
        """Return predictions of the configurations that may be measured next.

        Args:
            positions: the allowed micro batch sizes, as indices of ``Space.batch_size_grid``.
            time: model that predicts the time of a step.
            measured: configurations that have run; coordinate descents start there, at default settings, and where the
                descents of earlier calls ended.
            cost: the best measured cost; None before anything has run.
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
        """Return the settings at which a descent from the best of ``starts`` ends.

        None if ``cost``, the best measured cost, is out of reach, or none of ``starts`` has a prediction.
        """
        places = [
            one for start in dict.fromkeys(starts) if (one := self._best_micro_batch(start)) is not None
        ]
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

    def _best_micro_batch(self, structure: Structure) -> _Place | None:
        """Return (prediction, index) of the best micro batch size for ``structure``.

        The index is a position in the list of allowed sizes. None if the settings are illegal, or were not dry-run.
        """
        if not self._groups.is_legal(structure):
            return None
        found = self._predict([(structure, idx) for idx in range(len(self._positions))])
        fitting = [one for one in found if one[0].probability_to_fit >= _FITS] or found[:1]
        return min(fitting, key=lambda one: one[0].cost, default=None)

    def _move(self, at: Prediction, idx: int, stds: float) -> _Place | None:
        """Return (prediction, index of its micro batch size) after the best change.

        A change is one of a setting, of the micro batch size, or of both. ``at`` and ``idx`` are the prediction and the index
        before it. Costs are compared ``stds`` standard deviations below their medians. None if no change lowers the cost.
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
