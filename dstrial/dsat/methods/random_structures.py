"""Methods ``binary``, ``asha`` and ``random``, which measure random structures.

A structure is a ZeRO stage and settings, without batch sizes. A search measures the user's own configuration, then draws
structures. The trials of one structure are a *lineage*; its range of micro batches narrows with every trial.

Source: Determined 0.37 documentation, "DeepSpeed Autotune", methods ``binary``, ``asha`` and ``random``; Li et al. 2020, "A
System for Massively Parallel Hyperparameter Tuning", algorithm 2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from dstrial.config.dotted_keys import value_at
from dstrial.dsat.core.candidate import Candidate
from dstrial.dsat.core.outcome import Failure, FailureKind, Measured, Outcome, score
from dstrial.dsat.methods.base import NEED_SMALLEST, Action, Finish, Measure, MethodOptions, Observation
from dstrial.dsat.predictor.config_groups import ConfigGroups
from dstrial.dsat.space import KNOBS, Space, Structure
from dstrial.search.sampling import SearchRandom

_MAX_SKIPPED = 2000  # number of skipped candidates in a row after which a search waits or ends
_GROWING = {knob.path for knob in KNOBS if knob.grows_memory}  # keys of which larger values need more memory


@dataclasses.dataclass(slots=True)
class Lineage:
    """The trials of one random choice of ZeRO stage and settings.

    The trials differ in the micro batch size. A *position* is the index of a size in ``Space.batch_size_grid``.
    """

    idx: int
    structure: Structure
    low: int  # positions from ``low`` to ``high`` are left to try; none if ``high < low``
    high: int
    first_high: int  # the latest estimate of the largest position that fits
    # (position, score or None if out of memory, rung) of each trial
    history: list[tuple[int, float | None, int]] = dataclasses.field(default_factory=list)
    rung: int = 0  # level that the lineage has reached in ASHA
    is_closed: bool = False  # gets no more trials
    is_open: bool = False  # one of its trials is being measured

    def best(self, last_rung: int) -> float | None:
        """Return the best score of trials in rungs 0 to ``last_rung``; None without any."""
        scores = [value for _, value, rung in self.history if value is not None and rung <= last_rung]
        return max(scores, default=None)


class BinarySearch:
    """Draws settings at random; finds the largest micro batch of each by bisection.

    The trials of one random choice are a *lineage*. A trial that runs raises the lower end of its lineage's range of micro batch
    sizes; an out-of-memory error lowers the upper end. A lineage whose range is empty gets no more trials. Throughput has no
    effect on the order of trials.
    """

    def __init__(self, space: Space, options: MethodOptions) -> None:
        self.forecasts: Mapping[int, Mapping[str, Any]] = {}
        self.space = space
        self.options = options
        self.random = SearchRandom(options.random_seed)
        self.lineages: list[Lineage] = []
        self.info: ModelInfo | None = None
        self.observations: dict[int, Observation] = {}
        self._groups = ConfigGroups(space)
        self._lineage_of: dict[int, tuple[Lineage, int]] = {}  # trial -> its lineage and position
        self._is_finished = False
        self._best_score: float | None = None
        self._num_since_best = 0

    # ---- what subclasses override ----------------------------------------------------------------

    def choose(self) -> Lineage:
        """Return the lineage (trials with the same settings) that gets the next trial."""
        waiting = self._waiting()
        return waiting[0] if waiting else self.new_lineage(self.space.stages)

    def why(self, lineage: Lineage) -> str:
        return f"lineage {lineage.idx + 1}"

    def new_range(self, stage: int) -> tuple[int, int]:
        """Return (lowest, highest) index of the sizes to try first with a ZeRO stage.

        The indices are those of ``Space.batch_size_grid``.
        """
        return 0, self.ceiling(stage)

    def position(self, lineage: Lineage) -> int:
        """Return the grid index of the micro batch size that a lineage tries next."""
        return (lineage.low + lineage.high) // 2

    def learn(self, lineage: Lineage, position: int, value: float | None) -> None:
        """Narrow the range of micro batch sizes of a lineage after one of its trials.

        ``position`` is the index of the trial's micro batch size; ``value`` is the trial's score, None if the trial ran out of
        memory.
        """
        if value is None:
            lineage.high = position - 1
        else:
            lineage.low = position + 1
            last = self.space.batch_size_grid.last
            if position == lineage.first_high < last:  # the first guess at the largest size was too low
                lineage.high = lineage.first_high = min(2 * position + 1, last)
        lineage.is_closed = lineage.high < lineage.low

    # ---- the contract of a method ----------------------------------------------------------------

    def start(self) -> list[Action]:
        return [self._measure(self.space.own(), "your configuration")]

    def on_result(self, trial_id: int, outcome: Outcome) -> list[Action]:
        if self._is_finished:
            return []
        self.observations[trial_id] = Observation(self.observations[trial_id].candidate, outcome)
        value = score(outcome, self.options.metric)
        if value is not None and (self._best_score is None or value > self._best_score):
            self._best_score, self._num_since_best = value, 0
        else:
            self._num_since_best += 1
        if isinstance(outcome, Failure) and outcome.kind.ends_search:
            return self._finish(f"{outcome.kind.value}: {outcome.message}")
        if trial_id not in self._lineage_of:
            return self._begin(trial_id, outcome)
        lineage, position = self._lineage_of[trial_id]
        lineage.is_open = False
        self._record(lineage, position, outcome)
        limit = self.options.early_stopping
        if limit is not None and self._num_since_best >= limit:
            return self._finish(f"{limit} trials brought no new best")
        return self._fill()

    # ---- lineages --------------------------------------------------------------------------------

    def ceiling(self, stage: int) -> int:
        """Return the index of the largest micro batch size that may fit with a ZeRO stage.

        The size is estimated from the first measurement, and multiplied by ``search_range_factor``. Without an estimate, the
        result is the index of the largest size. If the global batch size may change, twice the user's micro batch then serves
        as the estimate.
        """
        sizes = self.space.batch_size_grid
        guess = None if self.info is None else largest_micro_batch(self.info, stage, self.space)
        if guess is None:
            if not sizes.is_free:
                return self.space.first_position(sizes.last)
            guess = 2 * self.space.own().batch.micro_batch_size
        highest = max(0, min(sizes.position(max(guess * self.options.search_range_factor, 1)), sizes.last))
        return self.space.first_position(highest)

    def new_lineage(self, stages: tuple[int, ...]) -> Lineage:
        """Draw a ZeRO stage from ``stages``, and settings; return a new lineage for them."""
        stage = stages[self.random.integer_below(len(stages))]
        low, high = self.new_range(stage)
        structure = self.space.draw(self.random, stage, self._num_params)
        lineage = Lineage(len(self.lineages), structure, low, high, high)
        self.lineages.append(lineage)
        return lineage

    def _waiting(self) -> list[Lineage]:
        return [lineage for lineage in self.lineages if not lineage.is_closed and not lineage.is_open]

    def _record(self, lineage: Lineage, position: int, outcome: Outcome) -> None:
        value = score(outcome, self.options.metric)
        lineage.history.append((position, value, lineage.rung))
        if isinstance(outcome, Failure) and not outcome.kind.is_out_of_memory:
            lineage.is_closed = True
        else:
            self.learn(lineage, position, value)

    @property
    def _num_params(self) -> float | None:
        return None if self.info is None else self.info.num_params

    # ---- measuring -------------------------------------------------------------------------------

    def _measure(self, candidate: Candidate, why: str) -> Measure:
        trial_id = len(self.observations) + 1
        self.observations[trial_id] = Observation(candidate, None)
        return Measure(trial_id, candidate, why)

    def _begin(self, trial_id: int, outcome: Outcome) -> list[Action]:
        """Return the actions after the first trial, which has the user's configuration.

        If that trial ran out of memory, its ZeRO stage and settings are measured with the smallest micro batch. Any other
        failure, or a second one, ends the search.
        """
        if isinstance(outcome, Measured):
            self.info = ModelInfo.from_measured(outcome)
            return self._fill()
        smallest = self.space.smallest()
        is_smaller = smallest.batch.micro_batch_size < self.space.own().batch.micro_batch_size
        may_repeat = trial_id == 1 and is_smaller and self.options.max_trials > 1
        if outcome.kind.is_out_of_memory and may_repeat:
            return [self._measure(smallest, "your structure with the smallest micro batch")]
        return self._finish(f"error in the first trial ({outcome.kind.value}). {NEED_SMALLEST}")

    def _fill(self) -> list[Action]:
        """Return measurements until ``num_parallel`` trials run; if none is left, the end."""
        actions: list[Action] = []
        num_open = sum(observation.outcome is None for observation in self.observations.values())
        for _ in range(_MAX_SKIPPED):
            if num_open >= self.options.num_parallel or len(self.observations) >= self.options.max_trials:
                break
            lineage = self.choose()
            position = self.position(lineage)
            candidate = self.space.candidate(lineage.structure, position)
            known = self._known_outcome(candidate)
            if known is not None:
                self._record(lineage, position, known)
                continue
            action = self._measure(candidate, self.why(lineage))
            self._lineage_of[action.trial_id] = (lineage, position)
            lineage.is_open = True
            actions.append(action)
            num_open += 1
        if num_open:
            return actions
        num_trials = len(self.observations)
        is_spent = num_trials >= self.options.max_trials
        reason = f"all {num_trials} trials completed" if is_spent else "nothing new is left to try"
        return [*actions, *self._finish(reason)]

    def _known_outcome(self, candidate: Candidate) -> Outcome | None:
        """Return the outcome of a candidate without measuring it; None if unknown.

        If an equivalent candidate has been measured, the outcome is the earlier one. The outcome is a failure if the candidate
        is illegal or is being measured. It is also one if the candidate needs at least the memory of one that ran out of
        memory.
        """
        reason = self.space.illegal_reason(candidate)
        if reason is not None:
            return Failure(FailureKind.BAD_CONFIG, reason)
        identity = self._groups.identity(candidate, self._num_params)
        for one in self.observations.values():
            is_lost = isinstance(one.outcome, Failure) and one.outcome.kind is FailureKind.COMMUNICATION
            if not is_lost and self._groups.identity(one.candidate, self._num_params) == identity:
                return one.outcome or Failure(FailureKind.BAD_CONFIG, "it is being measured")
        for one in self.observations.values():
            if (
                isinstance(one.outcome, Failure)
                and one.outcome.kind.is_out_of_memory
                and needs_no_less_memory(candidate, one.candidate, self.space)
            ):
                return one.outcome
        return None

    def _finish(self, reason: str) -> list[Action]:
        self._is_finished = True
        return [Finish(reason, is_failure=self._best_score is None)]


def needs_no_less_memory(candidate: Candidate, other: Candidate, space: Space) -> bool:
    """Return whether ``candidate`` surely needs at least as much memory as ``other``.

    True if the ZeRO stage is the same, micro batch and buckets are no smaller, and nothing else differs.
    """
    if candidate.stage != other.stage or candidate.batch.micro_batch_size < other.batch.micro_batch_size:
        return False
    mine, theirs = dict(candidate.settings), dict(other.settings)
    for path in mine.keys() | theirs.keys():
        left, right = (known.get(path, value_at(space.base, path)) for known in (mine, theirs))
        if left != right and (path not in _GROWING or left is None or right is None or left < right):
            return False
    return True


class AshaSearch(BinarySearch):
    """Binary searches over micro batches, under asynchronous successive halving.

    The resource of a lineage (the trials with the same settings) is its number of trials. Rung *i* is complete after *r* x
    *eta* ^ (*s* + *i*) trials, or when no micro batch is left to try. *r*, *eta* and *s* are ``min_binary_search_trials``,
    ``divisor`` and ``asha_early_stopping``. The best 1 / *eta* of the lineages that completed a rung are promoted.
    """

    def choose(self) -> Lineage:
        """Return a lineage whose rung is incomplete, else a promoted one, else a new one."""
        incomplete = [lineage for lineage in self._waiting() if not self.is_complete(lineage)]
        if incomplete:
            return max(incomplete, key=lambda one: (one.rung, len(one.history), -one.idx))
        return self._promote() or self.new_lineage(self.space.stages)

    def why(self, lineage: Lineage) -> str:
        return f"lineage {lineage.idx + 1}, rung {lineage.rung}"

    def is_complete(self, lineage: Lineage) -> bool:
        """Return whether a lineage has had all trials of its rung, or gets no more."""
        return lineage.is_closed or len(lineage.history) >= self.trials_of(lineage.rung)

    def trials_of(self, rung: int) -> int:
        """Return the total number of trials after which a lineage completes a rung."""
        options = self.options
        return int(options.min_binary_search_trials * options.divisor ** (options.asha_early_stopping + rung))

    def _promote(self) -> Lineage | None:
        """Promote the best lineage that is due, and return it; None if none is due."""
        for rung in reversed(range(self.options.max_rungs - 1)):
            finished = [
                lineage
                for lineage in self.lineages
                if lineage.rung > rung or (lineage.rung == rung and self.is_complete(lineage))
            ]
            ranked = sorted(
                (lineage for lineage in finished if lineage.best(rung) is not None),
                key=lambda one: (-(one.best(rung) or 0.0), one.idx),
            )
            for lineage in ranked[: len(finished) // self.options.divisor]:
                if lineage.rung == rung and not lineage.is_closed and not lineage.is_open:
                    lineage.rung += 1
                    return lineage
        return None


class RandomConfigSearch(BinarySearch):
    """Draws ZeRO stages, settings and micro batches (near mid-range) at random.

    Stage 3 communicates more, so it is not tried after a trial with stage 1 or 2 has run. A *lineage* (the trials of the same
    settings) ends after ``trials_per_random_config`` trials or if no micro batch fits. After an out-of-memory error it also
    ends if another lineage of its stage ran with at least its largest micro batch.

    The range of a new lineage begins at the best micro batch of its stage. The range ends below sizes that did not fit.
    """

    def choose(self) -> Lineage:
        for lineage in self._waiting():
            if not self._is_over(lineage):
                return lineage
            lineage.is_closed = True
        has_excluded = self._excludes_stage_3()
        return self.new_lineage(tuple(stage for stage in self.space.stages if stage != 3 or not has_excluded))

    def new_range(self, stage: int) -> tuple[int, int]:
        sizes = self.space.batch_size_grid
        ceiling = high = self.ceiling(stage)
        runs: list[tuple[float, int]] = []
        for one in self._ended(stage):
            position = sizes.position(one.candidate.batch.micro_batch_size)
            value = None if one.outcome is None else score(one.outcome, self.options.metric)
            if value is not None:
                runs.append((value, position))
            elif isinstance(one.outcome, Failure) and one.outcome.kind.is_out_of_memory:
                high = min(high, position - 1)
        if not runs:
            return 0, ceiling
        high = max(high, *(position for _, position in runs))
        return min(max(runs)[1], high), high

    def position(self, lineage: Lineage) -> int:
        coins = lineage.high - lineage.low
        return lineage.low + sum(self.random.integer_below(2) for _ in range(coins))

    def learn(self, lineage: Lineage, position: int, value: float | None) -> None:
        last = self.space.batch_size_grid.last
        if value is None:
            lineage.is_closed = position <= lineage.low
            lineage.high = max(position - 1, lineage.low)
            return
        lineage.low = min(position + 1, last)
        if lineage.high < position + 1:
            lineage.high = min(2 * (position + 1), last)
        lineage.is_closed = position >= last

    def _is_over(self, lineage: Lineage) -> bool:
        if len(lineage.history) >= self.options.trials_per_random_config:
            return True
        if lineage.structure.stage == 3 and self._excludes_stage_3():
            return True
        return any(value is None for _, value, _ in lineage.history) and any(
            value is not None and position >= lineage.high
            for other in self.lineages
            if other.idx != lineage.idx and other.structure.stage == lineage.structure.stage
            for position, value, _ in other.history
        )

    def _excludes_stage_3(self) -> bool:
        """Return whether a trial with stage 1 or 2 has run, which rules out stage 3."""
        ended = [*self._ended(1), *self._ended(2)]
        has_others = bool({1, 2} & set(self.space.stages))
        return has_others and any(isinstance(one.outcome, Measured) for one in ended)

    def _ended(self, stage: int) -> list[Observation]:
        return [one for one in self.observations.values() if one.candidate.stage == stage and one.outcome]


# ---- the first guess at the largest micro batch -------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class ModelInfo:
    """Size of the model and memory of the device, from the first measurement."""

    num_params: float
    num_trainable_params: float
    activation_bytes: float | None  # kept for backward per record of one micro batch
    device_bytes: float | None  # None where the device is the CPU

    @classmethod
    def from_measured(cls, measured: Measured) -> ModelInfo | None:
        """Return a measurement's model info; None if the number of parameters is missing."""
        params, trainable = measured.value("num_params"), measured.value("num_trainable_params")
        if params is None:
            return None
        activations, device = (
            measured.value(name) for name in ("activation_bytes_per_record", "device_memory_bytes")
        )
        return cls(params, params if trainable is None else trainable, activations, device)


def _state_bytes(info: ModelInfo, stage: int, space: Space) -> float:
    """Return a device's bytes of parameters, gradients and Adam's optimizer state."""
    # Adam in half precision: 12 bytes per parameter (master weight, two moments), else 8. Rajbhandari et al. 2020, section 3.1.
    width, replicas = space.bytes_per_value, space.replicas
    optimizer = info.num_trainable_params * (12 if width == 2 else 8) / (replicas if stage >= 1 else 1)
    gradients = info.num_trainable_params * width / (replicas if stage >= 2 else 1)
    params = info.num_params * width / (replicas if stage >= 3 else 1)
    return params + gradients + optimizer


def largest_micro_batch(info: ModelInfo, stage: int, space: Space) -> int | None:
    """Return the largest micro batch that may fit on the device; None if unknown.

    The result is at least 1, even if 1 does not fit.
    """
    if info.device_bytes is None or not info.activation_bytes:
        return None
    free = info.device_bytes - _state_bytes(info, stage, space)
    return max(int(free // info.activation_bytes), 1)
