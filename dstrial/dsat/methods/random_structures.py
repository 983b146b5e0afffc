"""Methods ``binary``, ``asha`` and ``random``, which measure random structures.

A structure is a ZeRO stage and settings, without batch sizes. A search measures the user's own configuration, then draws
structures. The trials of one structure are a *lineage*; its range of micro batches narrows with every trial.

Source: Determined 0.37 documentation, "DeepSpeed Autotune", methods ``binary``, ``asha`` and ``random``; Li et al. 2020, "A
System for Massively Parallel Hyperparameter Tuning", algorithm 2.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from dstrial.dsat.core.candidate import Candidate
from dstrial.dsat.core.outcome import Failure, Measured, Outcome, score
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
from dstrial.dsat.predictor.inputs import ModelInfo, largest_micro_batch, log_lines
from dstrial.dsat.space.filters import Filters, Observation, best_knob_effects, trials_for_effects
from dstrial.dsat.space.space import Space, Structure
from dstrial.search.random_state import SearchRandom

_MAX_SKIPPED = 2000  # number of skipped candidates in a row after which a search waits or ends


@dataclasses.dataclass(slots=True)
class Lineage:
    """The trials of one random structure (a configuration without batch sizes)."""

    idx: int
    structure: Structure
    low: int  # position in the grid of micro batches; the range is empty if ``high < low``
    high: int
    first_high: int
    # (position, score, rung)
    history: list[tuple[int, float | None, int]] = dataclasses.field(default_factory=list)
    rung: int = 0
    is_closed: bool = False  # gets no more trials
    is_open: bool = False  # one of its trials is being measured

    def best(self, last_rung: int | None = None) -> float | None:
        """Return the best score up to rung ``last_rung`` (None: all); None if unmeasured."""
        scores = [
            value
            for _, value, rung in self.history
            if value is not None and (last_rung is None or rung <= last_rung)
        ]
        return max(scores, default=None)


class BinarySearch:
    """Draws random structures, and finds the largest micro batch of each by bisection.

    A structure is a configuration without batch sizes, with a range of micro batches to try. A trial that runs raises the lower
    end of its structure's range; an out-of-memory error lowers the upper end. A structure whose range is empty gets no more
    trials. Throughput has no effect on the order of trials.
    """

    def __init__(self, space: Space, options: MethodOptions, filters: Filters) -> None:
        self.space = space
        self.options = options
        self.filters = filters
        self.random = SearchRandom(options.seed)
        self.lineages: list[Lineage] = []
        self.info: ModelInfo | None = None
        self.observations: dict[int, Observation] = {}
        self._lineage_of: dict[int, tuple[int, int]] = {}  # trial -> index of its lineage, position
        self._unproven: list[Candidate] = []
        self._phase: Literal["own", "smallest", "search", "finished"] = "own"
        self._best_score: float | None = None
        self._num_since_best = 0

    # ---- what subclasses override ----------------------------------------------------------------

    def choose(self) -> Lineage:
        """Return the lineage (all trials of one structure) that gets the next trial."""
        waiting = self._waiting()
        return waiting[0] if waiting else self.new_lineage(self.space.stages)

    def why(self, lineage: Lineage) -> str:
        return f"lineage {lineage.idx + 1}"

    def new_range(self, stage: int) -> tuple[int, int]:
        """Return the range of micro batches that a new lineage of a ZeRO stage searches.

        The range is (lowest index, highest index) in the grid of micro batches.
        """
        return 0, self.ceiling(stage)

    def position(self, lineage: Lineage) -> int:
        """Return the index, in the grid of micro batches, that a lineage tries next."""
        return (lineage.low + lineage.high) // 2

    def learn(self, lineage: Lineage, position: int, value: float | None) -> None:
        """Update a lineage's range of micro batches after a trial at index ``position``.

        ``value`` is the trial's score; None if it ran out of memory. A lineage with an empty range is closed.
        """
        if value is None:
            lineage.high = position - 1
        else:
            lineage.low = position + 1
            last = self.space.batch_size_grid.last
            # The first guess at the largest micro batch was too low, so the range is extended.
            if not self.filters.disabled and position == lineage.first_high < last:
                lineage.high = lineage.first_high = min(2 * position + 1, last)
        lineage.is_closed = lineage.high < lineage.low

    # ---- the contract of a method ----------------------------------------------------------------

    def start(self) -> list[Action]:
        return [self._measure(self.space.own(), "your configuration")]

    def on_result(self, trial_id: int, outcome: Outcome) -> list[Action]:
        if self._phase == "finished":
            return []
        candidate = self.observations[trial_id].candidate
        self.observations[trial_id] = Observation(candidate, outcome)
        value = score(outcome, self.options.metric)
        if value is not None and (self._best_score is None or value > self._best_score):
            self._best_score, self._num_since_best = value, 0
        else:
            self._num_since_best += 1
        if isinstance(outcome, Failure) and outcome.kind.ends_search:
            return self._finish(f"{outcome.kind.value}: {outcome.message}")
        if self._phase in ("own", "smallest"):
            return self._begin(outcome)
        if trial_id not in self._lineage_of:
            return [*self._effects_of(candidate), *self._fill()]
        lineage_idx, position = self._lineage_of[trial_id]
        lineage = self.lineages[lineage_idx]
        lineage.is_open = False
        self._record(lineage, position, outcome)
        limit = self.options.early_stopping
        if limit is not None and self._num_since_best >= limit:
            return self._finish(f"{limit} trials brought no new best")
        return self._fill()

    def report_facts(self) -> ReportFacts:
        return ReportFacts()

    # ---- lineages --------------------------------------------------------------------------------

    def ceiling(self, stage: int) -> int:
        """Return the grid index of the largest micro batch that may fit with a ZeRO stage.

        The size is estimated from the first measurement, and multiplied by ``search_range_factor``. Without an estimate, the
        largest size of the grid counts as fitting, or twice the user's own micro batch if the grid is unlimited.
        """
        sizes = self.space.batch_size_grid
        guess = None
        if self.info is not None:
            guess = largest_micro_batch(self.info, stage, self.space)
        if guess is None:
            if not sizes.is_free:
                return self.space.first_position(sizes.last)
            guess = 2 * self.space.own().batch.micro_batch_size
        highest = max(0, min(sizes.position(max(guess * self.options.search_range_factor, 1)), sizes.last))
        return self.space.first_position(highest)

    def new_lineage(self, stages: tuple[int, ...]) -> Lineage:
        """Draw a ZeRO stage and settings; return a ``Lineage`` to search micro batches."""
        stage = stages[self.random.integer_below(len(stages))]
        low, high = self.new_range(stage)
        num_params = None if self.info is None or self.filters.disabled else self.info.num_params
        structure = self.space.draw(self.random, stage, num_params)
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

    # ---- measuring -------------------------------------------------------------------------------

    def _measure(self, candidate: Candidate, why: str) -> Measure:
        trial_id = len(self.observations) + 1
        self.observations[trial_id] = Observation(candidate, None)
        return Measure(trial_id, candidate, why)

    def _begin(self, outcome: Outcome) -> list[Action]:
        """Return the actions after the first trial, the user's configuration."""
        if isinstance(outcome, Measured):
            self._phase = "search"
            self.info = ModelInfo.from_measured(outcome)
            if not self.filters.disabled:
                self._unproven = trials_for_effects(self.space)
            if self.info is None:
                return self._fill()
            self.filters.note_params(self.info.num_params)
            return [*map(Note, log_lines(self.info, self.space)), *self._fill()]
        smallest = self.space.smallest()
        is_smaller = smallest.batch.micro_batch_size < self.space.own().batch.micro_batch_size
        may_repeat = self._phase == "own" and is_smaller and self.options.max_trials > 1
        if outcome.kind.is_out_of_memory and may_repeat:
            self._phase = "smallest"
            return [self._measure(smallest, "your structure with the smallest micro batch")]
        return self._finish(f"error in the first trial ({outcome.kind.value}). {NEED_SMALLEST}")

    def _fill(self) -> list[Action]:
        """Return measurements until ``num_parallel`` trials run, or the end of the search."""
        actions: list[Action] = []
        num_open = sum(1 for observation in self.observations.values() if observation.outcome is None)
        for _ in range(_MAX_SKIPPED):
            if num_open >= self.options.num_parallel or len(self.observations) >= self.options.max_trials:
                break
            known = list(self.observations.values())
            if self._unproven:
                candidate = self._unproven.pop(0)
                if self.filters.check(candidate, known) is None:
                    actions.append(self._measure(candidate, "to prove that a knob does something"))
                    num_open += 1
                continue
            lineage = self.choose()
            position = self.position(lineage)
            candidate = self.space.candidate(lineage.structure, position)
            rejection = self.filters.check(candidate, known)
            if rejection is None:
                action = self._measure(candidate, self.why(lineage))
                self._lineage_of[action.trial_id] = (lineage.idx, position)
                lineage.is_open = True
                actions.append(action)
                num_open += 1
            elif rejection.outcome is None:
                lineage.is_closed = True
            else:
                if rejection.kind != "again":
                    actions.append(Skip(candidate, rejection.reason))
                self._record(lineage, position, rejection.outcome)
        if num_open == 0:
            num_trials = len(self.observations)
            is_spent = num_trials >= self.options.max_trials
            reason = f"all {num_trials} trials completed" if is_spent else "nothing new is left to try"
            return [*actions, *self._finish(reason)]
        return actions

    def _effects_of(self, candidate: Candidate) -> list[Action]:
        known = [(one.candidate, one.outcome) for one in self.observations.values()]
        paths = {path for path, _ in candidate.settings}
        return [Note(str(effect)) for effect in best_knob_effects(self.space, known) if effect.path in paths]

    def _finish(self, reason: str) -> list[Action]:
        self._phase = "finished"
        return [Finish(reason, is_failure=self._best_score is None)]


class AshaSearch(BinarySearch):
    """Binary searches over micro batches, under asynchronous successive halving.

    A lineage is the binary search for one structure; its resource is the number of trials. Rung *i* is complete after *r* x
    *eta* ^ (*s* + *i*) trials (``min_binary_search_trials``, ``divisor``, ``asha_early_stopping``), or when the range is empty.
    The best 1 / *eta* of the lineages that completed a rung are promoted.
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
        return lineage.is_closed or len(lineage.history) >= self.trials_of(lineage.rung)

    def trials_of(self, rung: int) -> int:
        options = self.options
        return int(options.min_binary_search_trials * options.divisor ** (options.asha_early_stopping + rung))

    def _promote(self) -> Lineage | None:
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
    """Draws ZeRO stages and settings at random, and micro batches near mid-range.

    After a trial with stage 1 or 2 has run, stage 3 is not tried any more, because it communicates more. A lineage (the trials
    of one structure) ends after ``trials_per_random_config`` trials or if no micro batch fits. It also ends if one of its trials
    has failed, and another lineage of the same stage has run with a micro batch at or above this lineage's upper end.

    The range of a new lineage begins at the best micro batch of its stage, and ends below sizes known not to fit. With
    ``--no-gates``, it begins above the best micro batch, as in Determined's documentation.
    """

    def choose(self) -> Lineage:
        for lineage in self._waiting():
            if not self._is_over(lineage):
                return lineage
            lineage.is_closed = True
        has_excluded = self._excludes_stage_3()
        return self.new_lineage(tuple(stage for stage in self.space.stages if stage != 3 or not has_excluded))

    def new_range(self, stage: int) -> tuple[int, int]:
        sizes, ceiling = self.space.batch_size_grid, self.ceiling(stage)
        high = ceiling
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
        best, largest = max(runs)[1], max(position for _, position in runs)
        if self.filters.disabled:
            low = min(best + 1, sizes.last)
            return low, min(max(largest, ceiling, 2 * low), sizes.last)
        high = max(largest, high)
        return min(best, high), high

    def position(self, lineage: Lineage) -> int:
        coins = lineage.high - lineage.low
        return lineage.low + sum(self.random.integer_below(2) for _ in range(coins))

    def learn(self, lineage: Lineage, position: int, value: float | None) -> None:
        """Raise the least micro batch to try after a success, lower the largest otherwise."""
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
        return any(stage in (1, 2) for stage in self.space.stages) and any(
            isinstance(one.outcome, Measured) for stage in (1, 2) for one in self._ended(stage)
        )

    def _ended(self, stage: int) -> list[Observation]:
        return [one for one in self.observations.values() if one.candidate.stage == stage and one.outcome]


_RANGE = Flag(
    "--search-range-factor", float, 1.0, "factor on the first estimate of the largest micro batch (1.0)", None
)

BINARY = MethodEntry(
    "binary",
    "random settings, each with a binary search for the largest micro batch",
    lambda space, options, filters, _inputs: BinarySearch(space, options, filters),
    (_RANGE,),
)

ASHA = MethodEntry(
    "asha",
    "random settings, each with a binary search for the largest micro batch; ASHA gives the best settings more trials",
    lambda space, options, filters, _inputs: AshaSearch(space, options, filters),
    (
        _RANGE,
        Flag("--max-rungs", int, 5, "number of ASHA rungs (5)", 1),
        Flag(
            "--min-binary-search-trials",
            int,
            3,
            "number of trials of one binary search in the lowest rung (3)",
            1,
        ),
        Flag("--divisor", int, 2, "1 / DIVISOR of the binary searches are promoted to the next rung (2)", 2),
        Flag("--asha-early-stopping", int, 0, "number of lowest rungs to skip (0)", 0),
    ),
)

RANDOM = MethodEntry(
    "random",
    "random settings with random micro batches",
    lambda space, options, filters, _inputs: RandomConfigSearch(space, options, filters),
    (
        Flag(
            "--trials-per-random-config",
            int,
            5,
            "maximum number of trials with the same random settings (5)",
            1,
        ),
        Flag(
            "--early-stopping",
            int,
            None,
            "end the search after this number of trials without a new best trial",
            1,
        ),
    ),
)
