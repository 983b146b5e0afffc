"""What asha, binary and random share: lineages of random structures. Pure.

The user's own configuration is measured first. A lineage is one random structure with a range of micro batches that narrows
with every trial.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Literal

from dstrial.dsat.core.candidate import Candidate
from dstrial.dsat.core.outcome import Failure, FailureKind, Measured, Outcome, score
from dstrial.dsat.methods.base import (
    NEED_SMALLEST,
    Action,
    Finish,
    Measure,
    MethodOptions,
    Note,
    ReportFacts,
    Skip,
)
from dstrial.dsat.predictor.profiles import ModelInfo, largest_micro_batch, log_lines
from dstrial.dsat.space.filters import Filters, Observation
from dstrial.dsat.space.knob_effects import best_knob_effects, trials_for_effects
from dstrial.dsat.space.space import Space, Structure
from dstrial.search.random_state import SearchRandom


@dataclasses.dataclass(slots=True)
class Lineage:
    """A structure and the range of micro batches that is still in question."""

    idx: int
    structure: Structure
    low: int  # positions of the grid; the range is empty if ``high < low``
    high: int
    first_high: int
    # (position, score, rung)
    history: list[tuple[int, float | None, int]] = dataclasses.field(default_factory=list)
    rung: int = 0
    is_closed: bool = False  # nothing more is tried
    is_open: bool = False  # one of its trials is being measured

    @property
    def num_failed(self) -> int:
        return sum(1 for _, value, _ in self.history if value is None)

    def best(self, last_rung: int | None = None) -> float | None:
        """Return the best score, of the rungs up to ``last_rung`` if given."""
        scores = [
            value
            for _, value, rung in self.history
            if value is not None and (last_rung is None or rung <= last_rung)
        ]
        return max(scores, default=None)


_MAX_SKIPPED = 2000


class LineageMethod(abc.ABC):
    """A search over lineages; a method says which one goes on, and where in its range."""

    def __init__(self, space: Space, options: MethodOptions, filters: Filters) -> None:
        self.space = space
        self.options = options
        self.filters = filters
        self.random = SearchRandom(options.seed)
        self.lineages: list[Lineage] = []
        self.info: ModelInfo | None = None
        self.observations: dict[int, Observation] = {}
        self._lineage_of: dict[int, tuple[int, int]] = {}
        self._unproven: list[Candidate] = []
        self._phase: Literal["own", "smallest", "search", "finished"] = "own"
        self._best_score: float | None = None
        self._num_since_best = 0

    # ---- what a method decides -------------------------------------------------------------------

    @abc.abstractmethod
    def choose(self) -> Lineage:
        """Return the next trial's lineage, neither closed nor open; may begin a new one."""

    @abc.abstractmethod
    def position(self, lineage: Lineage) -> int:
        """Return where in its range a lineage is tried next."""

    @abc.abstractmethod
    def learn(self, lineage: Lineage, position: int, value: float | None) -> None:
        """Narrow a lineage's range by a score, None if it did not fit, or close it."""

    def new_range(self, stage: int) -> tuple[int, int]:
        """Return a new lineage's range: up to the first guess at the largest micro batch."""
        return 0, self.ceiling(stage)

    def why(self, lineage: Lineage) -> str:
        return f"lineage {lineage.idx + 1}"

    # ---- the contract ----------------------------------------------------------------------------

    def start(self) -> list[Action]:
        return [self._measure(self.space.own(), "your configuration")]

    def on_result(self, trial_id: int, outcome: Outcome) -> list[Action]:
        if self._phase == "finished":
            return []
        observation = self.observations[trial_id]
        self.observations[trial_id] = Observation(observation.candidate, outcome)
        value = score(outcome, self.options.metric)
        self._note_best(value)
        if isinstance(outcome, Failure) and outcome.kind in (FailureKind.USER_ERROR, FailureKind.CANCELED):
            return self._finish(
                f"{outcome.kind.value}: {outcome.message}", is_failure=self._best_score is None
            )
        if self._phase in ("own", "smallest"):
            return self._first(outcome)
        if trial_id not in self._lineage_of:
            return [*self._proved(observation.candidate), *self._fill()]
        lineage_idx, position = self._lineage_of[trial_id]
        lineage = self.lineages[lineage_idx]
        lineage.is_open = False
        self._step(lineage, position, outcome, value)
        limit = self.options.early_stopping
        if limit is not None and self._num_since_best >= limit:
            return self._finish(f"{limit} trials brought no new best")
        return self._fill()

    def report_facts(self) -> ReportFacts:
        return ReportFacts()

    # ---- what methods use ------------------------------------------------------------------------

    def ceiling(self, stage: int) -> int:
        """Return the position of the first guess at the largest micro batch of a stage."""
        ladder = self.space.batch_size_grid
        guess = None
        if self.info is not None:
            guess = largest_micro_batch(self.info, stage, self.space.replicas, self.space.bytes_per_value)
        if guess is None:
            if not ladder.is_free:
                return self.space.first_position(ladder.last)
            guess = 2 * self.space.own().batch.micro_batch_size
        highest = max(0, min(ladder.position(max(guess * self.options.search_range_factor, 1)), ladder.last))
        return self.space.first_position(highest)

    def new_lineage(self, stage: int) -> Lineage:
        low, high = self.new_range(stage)
        num_params = None if self.info is None or self.filters.disabled else self.info.num_params
        structure = self.space.draw(self.random, stage, num_params)
        lineage = Lineage(len(self.lineages), structure, low, high, high)
        self.lineages.append(lineage)
        return lineage

    def any_stage(self) -> int:
        return self.space.stages[self.random.integer_below(len(self.space.stages))]

    def narrow(self, lineage: Lineage, position: int, value: float | None) -> None:
        """Halve a range around a position by binary search; raise too low a guess."""
        if value is None:
            lineage.high = position - 1
        else:
            lineage.low = position + 1
            if not self.filters.disabled and position == lineage.first_high < self.space.batch_size_grid.last:
                last = self.space.batch_size_grid.last
                lineage.high = lineage.first_high = min(2 * position + 1, last)
        lineage.is_closed = lineage.high < lineage.low

    # ---- machinery -------------------------------------------------------------------------------

    def _measure(self, candidate: Candidate, why: str) -> Measure:
        trial_id = len(self.observations) + 1
        self.observations[trial_id] = Observation(candidate, None)
        return Measure(trial_id, candidate, why)

    def _note_best(self, value: float | None) -> None:
        if value is not None and (self._best_score is None or value > self._best_score):
            self._best_score, self._num_since_best = value, 0
        else:
            self._num_since_best += 1

    def _first(self, outcome: Outcome) -> list[Action]:
        """Begin with what the user's own configuration says of the model."""
        if isinstance(outcome, Measured):
            self.info = ModelInfo.from_measured(outcome)
            notes: list[Action] = []
            if self.info is not None:
                self.filters.note_params(self.info.num_params)
                lines = log_lines(
                    self.info, self.space.stages, self.space.replicas, self.space.bytes_per_value
                )
                notes = [Note(line) for line in lines]
            self._phase = "search"
            if not self.filters.disabled:
                self._unproven = trials_for_effects(self.space)
            return [*notes, *self._fill()]
        smallest = self.space.smallest()
        is_smaller = smallest.batch.micro_batch_size < self.space.own().batch.micro_batch_size
        if (
            self._phase == "own"
            and outcome.kind.is_out_of_memory
            and is_smaller
            and self.options.max_trials > 1
        ):
            self._phase = "smallest"
            return [self._measure(smallest, "your structure with the smallest micro batch")]
        return self._finish(
            f"error in the first trial ({outcome.kind.value}). {NEED_SMALLEST}", is_failure=True
        )

    def _fill(self) -> list[Action]:
        actions: list[Action] = []
        num_open = sum(1 for observation in self.observations.values() if observation.outcome is None)
        for _ in range(_MAX_SKIPPED):
            if num_open >= self.options.num_parallel or len(self.observations) >= self.options.max_trials:
                break
            if self._unproven:
                candidate = self._unproven.pop(0)
                if self.filters.check(candidate, list(self.observations.values())) is None:
                    actions.append(self._measure(candidate, "to prove that a knob does something"))
                    num_open += 1
                continue
            lineage = self.choose()
            position = self.position(lineage)
            candidate = self.space.candidate(lineage.structure, position)
            verdict = self.filters.check(candidate, list(self.observations.values()))
            if verdict is None:
                action = self._measure(candidate, self.why(lineage))
                self._lineage_of[action.trial_id] = (lineage.idx, position)
                lineage.is_open = True
                actions.append(action)
                num_open += 1
            elif verdict.kind == "open":
                lineage.is_closed = True
            else:
                if verdict.kind != "again":
                    actions.append(Skip(candidate, verdict.reason))
                assert verdict.outcome is not None
                self._step(lineage, position, verdict.outcome, score(verdict.outcome, self.options.metric))
        if num_open == 0:
            is_spent = len(self.observations) >= self.options.max_trials
            reason = (
                f"all {len(self.observations)} trials completed" if is_spent else "nothing new is left to try"
            )
            return [*actions, *self._finish(reason)]
        return actions

    def _step(self, lineage: Lineage, position: int, outcome: Outcome, value: float | None) -> None:
        lineage.history.append((position, value, lineage.rung))
        if isinstance(outcome, Failure) and not outcome.kind.is_out_of_memory:
            lineage.is_closed = True
        else:
            self.learn(lineage, position, value)

    def _proved(self, candidate: Candidate) -> list[Action]:
        """Return notes of what a trial with one changed knob has shown of that knob."""
        found = best_knob_effects(
            self.space, [(one.candidate, one.outcome) for one in self.observations.values()]
        )
        paths = {path for path, _ in candidate.settings}
        return [Note(str(proof)) for proof in found if proof.path in paths]

    def _finish(self, reason: str, *, is_failure: bool | None = None) -> list[Action]:
        self._phase = "finished"
        failed = self._best_score is None if is_failure is None else is_failure
        return [Finish(reason, failed)]
