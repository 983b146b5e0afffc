"""The micro batches that a search may try, as positions of a ladder. Pure."""

from __future__ import annotations

from dstrial.dsat.candidate import BatchSplit

_LARGEST_FREE_MICRO_BATCH = 4096


class Ladder:
    """The micro batches that may be tried, in ascending order, by position.

    Args:
        train_batch_size: records of one optimizer step; None lets it follow the micro batch (``--free-batch``).
        replicas: number of replicas.
        accumulation: the user's accumulation, kept where the batch is free.
    """

    def __init__(self, train_batch_size: int | None, replicas: int, accumulation: int) -> None:
        self._train_batch_size = train_batch_size
        self._replicas = replicas
        self._accumulation = accumulation
        per_replica = (train_batch_size or 0) // replicas
        self._divisors = tuple(size for size in range(1, per_replica + 1) if per_replica % size == 0)

    @property
    def is_free(self) -> bool:
        """Whether the global batch changes with the micro batch."""
        return self._train_batch_size is None

    @property
    def last(self) -> int:
        """The last position, from 0."""
        return _LARGEST_FREE_MICRO_BATCH - 1 if self.is_free else len(self._divisors) - 1

    def split(self, position: int) -> BatchSplit:
        """Return the batch at a position, 0 to ``last``."""
        if self._train_batch_size is None:
            micro = position + 1
            return BatchSplit(micro, self._accumulation, micro * self._accumulation * self._replicas)
        micro = self._divisors[position]
        return BatchSplit(micro, self._train_batch_size // (micro * self._replicas), self._train_batch_size)

    def position(self, micro_batch_size: float) -> int:
        """Return the position of the largest micro batch that is not above a size; 0 if all are."""
        if self.is_free:
            return max(0, min(int(micro_batch_size), _LARGEST_FREE_MICRO_BATCH) - 1)
        below = [position for position, size in enumerate(self._divisors) if size <= micro_batch_size]
        return below[-1] if below else 0
