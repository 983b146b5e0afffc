"""``binary``: in every random structure, search for the largest micro batch that runs by halving its range. Pure.

Source: Determined 0.37 documentation, "DeepSpeed Autotune", method ``binary``.
"""

from __future__ import annotations

from dstrial.dsat.methods.lineage import Lineage
from dstrial.dsat.methods.lineages import LineageMethod


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
