"""``binary`` and ``asha``: halve the micro batches of random structures. Pure.

Source: Determined 0.37 documentation, "DeepSpeed Autotune", methods ``binary`` and ``asha``; Li et al. 2020, "A System for
Massively Parallel Hyperparameter Tuning", algorithm 2.
"""

from __future__ import annotations

from dstrial.dsat.methods.base import Flag, MethodEntry
from dstrial.dsat.methods.lineage import Lineage, LineageMethod


class BinarySearch(LineageMethod):
    """Halves ranges of micro batches; throughput is remembered and does not steer.

    A success raises the lower end above it, running out of memory lowers the upper end below it, and an empty range
    is followed by a new random structure.
    """

    def choose(self) -> Lineage:
        """Go on with the oldest lineage that waits, or begin one."""
        waiting = [lineage for lineage in self.lineages if not lineage.is_closed and not lineage.is_open]
        return waiting[0] if waiting else self.new_lineage(self.any_stage())

    def position(self, lineage: Lineage) -> int:
        """Return the middle of the range."""
        return (lineage.low + lineage.high) // 2

    def learn(self, lineage: Lineage, position: int, value: float | None) -> None:
        """Halve the range."""
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
        """Say whether a lineage has had all trials of its rung."""
        return lineage.is_closed or len(lineage.history) >= self.trials_of(lineage.rung)

    def trials_of(self, rung: int) -> int:
        """Return how many trials complete a rung, from 0."""
        options = self.options
        return int(options.min_binary_search_trials * options.divisor ** (options.asha_early_stopping + rung))

    def why(self, lineage: Lineage) -> str:
        """Name lineage and rung."""
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


_RANGE = Flag(
    "--search-range-factor",
    float,
    1.0,
    "multiplies the first guess at the largest micro batch (1.0)",
    "range_factor",
    None,
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
        Flag("--max-rungs", int, 5, "number of rungs (5)", "max_rungs", 1),
        Flag(
            "--min-binary-search-trials",
            int,
            3,
            "trials of a lineage in the lowest rung (3)",
            "min_binary_search_trials",
            1,
        ),
        Flag("--divisor", int, 2, "one of so many lineages is promoted (2)", "divisor", 2),
        Flag("--asha-early-stopping", int, 0, "rungs that are left out below (0)", "asha_early_stopping", 0),
    ),
)
