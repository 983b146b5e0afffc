"""Plan which records each replica evaluates in each call of ``evaluate_batch``.

Each record counts once over all replicas. If forward passes are collective, all replicas make the same number of calls with
the same number of micro batches. The functions are pure.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class ValidationRound:
    """One call of ``evaluate_batch`` on one replica.

    Attributes:
        record_ranges: per micro batch of this replica, the half-open range ``(start, stop)`` of positions in the order in which
            the validation set is read. Empty if this replica skips the round.
        records: number of this replica's records that count in the mean loss. 0 for a skipped round, and for a filler round
            (see ``is_filler``).
        is_ragged: whether some replica has a micro batch smaller than the loader's batch size. Equal on all replicas, so that
            all replicas reset their activation buffers together.
    """

    record_ranges: tuple[tuple[int, int], ...]
    records: int
    is_ragged: bool

    @property
    def num_micro_batches(self) -> int:
        return len(self.record_ranges)

    @property
    def micro_batch_records(self) -> tuple[int, ...]:
        """Number of records in each micro batch of this replica, also of a filler round."""
        return tuple(stop - start for start, stop in self.record_ranges)

    @property
    def is_filler(self) -> bool:
        """Whether this replica evaluates another replica's record again, with weight 0.

        A replica does so to take part in the round's collective operations.
        """
        return self.records == 0 and self.num_micro_batches > 0


def plan_validation(
    num_records: int,
    records_per_micro_batch: int,
    micro_batches_per_round: int,
    replica: int,
    num_replicas: int,
    *,
    forward_is_collective: bool = True,
) -> tuple[ValidationRound, ...]:
    """Return the validation rounds of one replica, in order.

    First come rounds of ``micro_batches_per_round`` whole micro batches, then one round with the remaining whole micro batches.
    In a last round, the leftover records are spread evenly: one smaller micro batch per replica. If ``forward_is_collective``,
    a replica without a leftover record repeats the last record with weight 0; otherwise the replica skips the round.
    """
    size = records_per_micro_batch
    if num_records < 0 or size < 1 or micro_batches_per_round < 1 or not 0 <= replica < num_replicas:
        raise ValueError(
            f"a validation of {num_records} records in micro batches of {size}, {micro_batches_per_round} per round, for "
            f"replica {replica} of {num_replicas} cannot be planned; expected positive sizes and a replica from 0. "
            "Correct the arguments."
        )
    num_whole, num_left = divmod(num_records, size * num_replicas)
    rounds = []
    for first in range(0, num_whole, micro_batches_per_round):
        micro_batches = range(first, min(first + micro_batches_per_round, num_whole))
        starts = [(idx * num_replicas + replica) * size for idx in micro_batches]
        ranges = tuple((start, start + size) for start in starts)
        rounds.append(ValidationRound(ranges, len(starts) * size, is_ragged=False))
    if num_left:
        share, num_larger = divmod(num_left, num_replicas)
        num_mine = share + (1 if replica < num_larger else 0)
        start = num_records - num_left + replica * share + min(replica, num_larger)
        ranges = ((start, start + num_mine),)
        if num_mine == 0:
            ranges = ((num_records - 1, num_records),) if forward_is_collective else ()
        rounds.append(ValidationRound(ranges, num_mine, is_ragged=True))
    return tuple(rounds)
