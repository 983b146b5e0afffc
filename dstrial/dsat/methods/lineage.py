"""A lineage: one random structure with a range of micro batches that narrows with every trial. Pure."""

from __future__ import annotations

import dataclasses

from dstrial.dsat.space import Structure


@dataclasses.dataclass(slots=True)
class Lineage:
    """A structure and the range of micro batches that is still in question.

    Attributes:
        idx: its number, from 0.
        structure: what all its trials share.
        low: lowest position of the ladder that is in question.
        high: highest one; the range is exhausted when it is below ``low``.
        first_high: ``high`` as it was at first.
        history: (position, score, rung) of every step; the score is None for a failure.
        rung: the rung that it is in (asha).
        is_closed: whether nothing more is tried.
        is_open: whether one of its trials is being measured.
    """

    idx: int
    structure: Structure
    low: int
    high: int
    first_high: int
    history: list[tuple[int, float | None, int]] = dataclasses.field(default_factory=list)
    rung: int = 0
    is_closed: bool = False
    is_open: bool = False

    @property
    def num_failed(self) -> int:
        """How many of its steps failed."""
        return sum(1 for _, value, _ in self.history if value is None)

    def best(self, last_rung: int | None = None) -> float | None:
        """Return the best score, of the rungs up to one if given."""
        scores = [
            value
            for _, value, rung in self.history
            if value is not None and (last_rung is None or rung <= last_rung)
        ]
        return max(scores, default=None)
