"""Methods that draw structures: ``binary``, ``asha``, ``random``. Pure.

Each structure is measured with several micro batches.

Source: Determined 0.37 documentation, "DeepSpeed Autotune", methods ``binary``, ``asha`` and ``random``; Li et al. 2020, "A
System for Massively Parallel Hyperparameter Tuning", algorithm 2.
"""

from __future__ import annotations

from dstrial.dsat.core.outcome import Failure, score
from dstrial.dsat.methods.base import Flag, MethodEntry
from dstrial.dsat.methods.lineage import Lineage, LineageMethod
from dstrial.dsat.space.filters import Observation


class BinarySearch(LineageMethod):
    """Halves ranges of micro batches; throughput is remembered and does not steer.

    A success raises the lower end above it, running out of memory lowers the upper end below it, and an empty range
    is followed by a new random structure.
    """

    def choose(self) -> Lineage:
        waiting = [lineage for lineage in self.lineages if not lineage.is_closed and not lineage.is_open]
        return waiting[0] if waiting else self.new_lineage(self.any_stage())

    def position(self, lineage: Lineage) -> int:
        return (lineage.low + lineage.high) // 2

    def learn(self, lineage: Lineage, position: int, value: float | None) -> None:
        self.narrow(lineage, position, value)


class AshaSearch(BinarySearch):
    """Asynchronous halving over lineages.

    The resource is the number of trials of a lineage: rung *i* is complete after *r* x *eta* ^ (*s* + *i*) trials, or
    when nothing of the range is left. One of *eta* lineages that completed a rung goes on to the next.
    """

    def choose(self) -> Lineage:
        """Go on in an incomplete rung, else promote a rung's best, else begin a lineage."""
        waiting = [lineage for lineage in self.lineages if not lineage.is_closed and not lineage.is_open]
        incomplete = [lineage for lineage in waiting if not self.is_complete(lineage)]
        if incomplete:
            return max(incomplete, key=lambda one: (one.rung, len(one.history), -one.idx))
        promoted = self._promote()
        return promoted if promoted is not None else self.new_lineage(self.any_stage())

    def is_complete(self, lineage: Lineage) -> bool:
        return lineage.is_closed or len(lineage.history) >= self.trials_of(lineage.rung)

    def trials_of(self, rung: int) -> int:
        options = self.options
        return int(options.min_binary_search_trials * options.divisor ** (options.asha_early_stopping + rung))

    def why(self, lineage: Lineage) -> str:
        return f"lineage {lineage.idx + 1}, rung {lineage.rung}"

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


class RandomConfigSearch(LineageMethod):
    """Draws a stage, a structure, and micro batches around the middle of what is left.

    Once stage 1 or 2 has run, stage 3, which communicates more, is not tried any more. A lineage ends after
    ``trials_per_random_config`` trials, when nothing fits, or when it has failed and another one of its stage
    has run with as large a micro batch.

    With gates a new lineage begins at the best micro batch that is known for its stage and stays below those that are
    known not to fit. Without, it begins above the best one, as documented; that mostly runs out of memory.
    """

    def choose(self) -> Lineage:
        for lineage in self.lineages:
            if not lineage.is_closed and not lineage.is_open:
                if not self._is_over(lineage):
                    return lineage
                lineage.is_closed = True
        stages = [stage for stage in self.space.stages if stage != 3 or not self._is_stage_3_ruled_out()]
        return self.new_lineage(stages[self.random.integer_below(len(stages))])

    def new_range(self, stage: int) -> tuple[int, int]:
        ladder, high = self.space.batch_size_grid, self.ceiling(stage)
        observations = self._of_stage(stage)
        runs = [
            (value, ladder.position(one.candidate.batch.micro_batch_size))
            for one in observations
            if one.outcome is not None and (value := score(one.outcome, self.options.metric)) is not None
        ]
        if not runs:
            return 0, high
        best, largest = max(runs)[1], max(position for _, position in runs)
        if self.filters.disabled:
            low = min(best + 1, ladder.last)
            return low, min(max(largest, high, 2 * low), ladder.last)
        failed = [
            ladder.position(one.candidate.batch.micro_batch_size)
            for one in observations
            if isinstance(one.outcome, Failure) and one.outcome.kind.is_out_of_memory
        ]
        high = max(largest, min([high, *(position - 1 for position in failed)]))
        return min(best, high), high

    def position(self, lineage: Lineage) -> int:
        coins = lineage.high - lineage.low
        return lineage.low + sum(self.random.integer_below(2) for _ in range(coins))

    def learn(self, lineage: Lineage, position: int, value: float | None) -> None:
        """Move the lower end above a success, doubling a spent range, or the upper end."""
        if value is None:
            lineage.is_closed = position <= lineage.low
            lineage.high = max(position - 1, lineage.low)
            return
        lineage.low = min(position + 1, self.space.batch_size_grid.last)
        if lineage.high < position + 1:
            lineage.high = min(2 * (position + 1), self.space.batch_size_grid.last)
        lineage.is_closed = position >= self.space.batch_size_grid.last

    def _is_over(self, lineage: Lineage) -> bool:
        if len(lineage.history) >= self.options.trials_per_random_config:
            return True
        if lineage.structure.stage == 3 and self._is_stage_3_ruled_out():
            return True
        if not lineage.num_failed:
            return False
        return any(
            position >= lineage.high
            for other in self.lineages
            if other.idx != lineage.idx and other.structure.stage == lineage.structure.stage
            for position, value, _ in other.history
            if value is not None
        )

    def _is_stage_3_ruled_out(self) -> bool:
        has_smaller = any(stage in (1, 2) for stage in self.space.stages)
        return has_smaller and any(
            one.outcome is not None and not isinstance(one.outcome, Failure)
            for stage in (1, 2)
            for one in self._of_stage(stage)
        )

    def _of_stage(self, stage: int) -> list[Observation]:
        return [one for one in self.observations.values() if one.candidate.stage == stage]


_RANGE = Flag(
    "--search-range-factor", float, 1.0, "multiplies the first guess at the largest micro batch (1.0)", None
)

BINARY = MethodEntry(
    "binary",
    "random structures, each with a binary search for the largest micro batch",
    lambda space, options, filters, _inputs: BinarySearch(space, options, filters),
    (_RANGE,),
)

ASHA = MethodEntry(
    "asha",
    "random structures, each with a binary search that has to earn its trials",
    lambda space, options, filters, _inputs: AshaSearch(space, options, filters),
    (
        _RANGE,
        Flag("--max-rungs", int, 5, "number of rungs (5)", 1),
        Flag("--min-binary-search-trials", int, 3, "trials of a lineage in the lowest rung (3)", 1),
        Flag("--divisor", int, 2, "one of so many lineages is promoted (2)", 2),
        Flag("--asha-early-stopping", int, 0, "rungs that are left out below (0)", 0),
    ),
)

RANDOM = MethodEntry(
    "random",
    "random structures with random micro batches",
    lambda space, options, filters, _inputs: RandomConfigSearch(space, options, filters),
    (
        Flag("--trials-per-random-config", int, 5, "most trials of one structure (5)", 1),
        Flag("--early-stopping", int, None, "end after so many trials without a new best", 1),
    ),
)
