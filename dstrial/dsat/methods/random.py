"""``random``: random structures, each with a few random micro batches. Pure.

Source: Determined 0.37 documentation, "DeepSpeed Autotune", method ``random``.
"""

from __future__ import annotations

from dstrial.dsat.core.outcome import Failure, score
from dstrial.dsat.methods.base import Flag, MethodEntry
from dstrial.dsat.methods.lineage import Lineage, LineageMethod
from dstrial.dsat.space.filters import Observation


class RandomConfigSearch(LineageMethod):
    """Draws a stage, a structure, and micro batches around the middle of what is left.

    Once stage 1 or 2 has run, stage 3, which communicates more, is not tried any more. A lineage ends after
    ``trials_per_random_config`` trials, when nothing fits, or when it has failed and another one of its stage
    has run with as large a micro batch.

    With gates a new lineage begins at the best micro batch that is known for its stage and stays below those that are
    known not to fit. Without, it begins above the best one, as documented; that mostly runs out of memory.
    """

    def choose(self) -> Lineage:
        """Go on with the oldest lineage that waits, or begin one."""
        for lineage in self.lineages:
            if not lineage.is_closed and not lineage.is_open:
                if not self._is_over(lineage):
                    return lineage
                lineage.is_closed = True
        stages = [stage for stage in self.space.stages if stage != 3 or not self._is_stage_3_ruled_out()]
        return self.new_lineage(stages[self.random.integer_below(len(stages))])

    def new_range(self, stage: int) -> tuple[int, int]:
        """Return the range around what is known of a stage."""
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
        """Draw from a binomial distribution over the range."""
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


RANDOM = MethodEntry(
    "random",
    "random structures with random micro batches",
    lambda space, options, filters, _inputs: RandomConfigSearch(space, options, filters),
    (
        Flag(
            "--trials-per-random-config",
            int,
            5,
            "most trials of one structure (5)",
            "trials_per_random_config",
            1,
        ),
        Flag(
            "--early-stopping", int, None, "end after so many trials without a new best", "early_stopping", 1
        ),
    ),
)
