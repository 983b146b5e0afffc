"""Choose the records of each global batch, and divide them into micro batches.

A batch's records depend only on seed, epoch, batch number and global batch size, not on the number of replicas or micro batches.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils import data

from dstrial.engine.random_state import RngState
from dstrial.errors import DataError

_BATCHES_PER_BLOCK = 64
"""Batches whose record numbers are read from a tensor at once; batch by batch, reading costs 6 µs each."""

EpochOrder = Callable[[int], "Sequence[Any]"]
"""Function that maps an epoch's index to its records: the sampler's items, in order of training."""


def _mixed_seed(*parts: int) -> int:
    """Hash numbers to a 63-bit seed; similar inputs give unrelated seeds."""
    return int(
        np.random.SeedSequence([part & 0xFFFFFFFFFFFFFFFF for part in parts]).generate_state(1, np.uint64)[0]
        >> 1
    )


class ShuffledOrder:
    """Maps an epoch to all record indices, shuffled with a seed of (seed, epoch)."""

    def __init__(self, num_records: int, seed: int) -> None:
        self._num_records = num_records
        self._seed = seed

    def __call__(self, epoch_idx: int) -> Sequence[int]:
        generator = torch.Generator().manual_seed(_mixed_seed(self._seed, epoch_idx))
        return _TensorSequence(torch.randperm(self._num_records, generator=generator))


class _TensorSequence(Sequence[int]):
    """A sequence of indices stored in a tensor (8 bytes each); slices are lists."""

    def __init__(self, indices: torch.Tensor) -> None:
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, where: Any) -> Any:
        return self._indices[where].tolist()


class SamplerOrder:
    """Maps an epoch to the items of a user's sampler.

    Because a sampler may have state, earlier epochs are sampled too, even if a run resumes in a later epoch. Each epoch starts
    from random states seeded by (seed, epoch).
    """

    def __init__(self, sampler: Any, seed: int) -> None:
        self._sampler = sampler
        self._seed = seed
        self._next_epoch = 0
        self._newest: list[Any] = []

    def __call__(self, epoch_idx: int) -> Sequence[Any]:
        """Return the sampler's items of one epoch.

        Raises:
            DataError: the epoch is before that of the previous call.
        """
        if epoch_idx == self._next_epoch - 1:
            return self._newest
        if epoch_idx < self._next_epoch:
            raise DataError(
                f"epoch {epoch_idx} of a user sampler is asked for after epoch {self._next_epoch - 1}; expected epochs "
                "in order. Build a new loader."
            )
        while self._next_epoch <= epoch_idx:
            with forked_random_state(_mixed_seed(self._seed, self._next_epoch)):
                if hasattr(self._sampler, "set_epoch"):
                    self._sampler.set_epoch(self._next_epoch)
                self._newest = list(self._sampler)
            self._next_epoch += 1
        return self._newest


@contextlib.contextmanager
def forked_random_state(seed: int) -> Iterator[None]:
    """Seed Python's, NumPy's and torch's CPU generators; restore them after the block."""
    before = RngState.read()
    seed_all(seed)
    try:
        yield
    finally:
        before.restore()


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)


def record_seed(seed: int, epoch_idx: int, record_idx: int) -> int:
    """Return a seed from 0 to 2**63 - 1 for the reading of one record in one epoch."""
    value = (seed * 0x9E3779B97F4A7C15 + epoch_idx * 0xBF58476D1CE4E5B9 + record_idx * 0x94D049BB133111EB) & (
        2**64 - 1
    )
    value ^= value >> 31
    return (value * 0xD6E8FEB86659FD93 & (2**64 - 1)) >> 1


def epoch_order(sampler: Any, num_records: int, seed: int) -> EpochOrder:
    """Return a function that maps an epoch's index to the sampler's items in order.

    ``sampler`` is a ``DataLoader``'s sampler or batch sampler.
    """
    if type(sampler) is data.SequentialSampler:
        return lambda _epoch_idx: range(num_records)
    if type(sampler) is data.RandomSampler and not sampler.replacement and sampler.num_samples == num_records:
        if sampler.generator is not None:
            seed = _mixed_seed(seed, sampler.generator.initial_seed())
        return ShuffledOrder(num_records, seed)
    return SamplerOrder(sampler, seed)


@dataclasses.dataclass(frozen=True, slots=True)
class BatchGeometry:
    """Sizes of a global batch, which all replicas train together in one step."""

    records_per_micro_batch: int
    micro_batches_per_batch: int
    num_replicas: int

    @property
    def num_slices(self) -> int:
        """Number of micro batches in one global batch, over all replicas."""
        return self.micro_batches_per_batch * self.num_replicas

    @property
    def train_batch_size(self) -> int:
        return self.records_per_micro_batch * self.num_slices


class GlobalBatches:
    """The records of each global batch (one optimizer step of all replicas).

    An epoch's last records may not fill a batch. With ``keep_tail``, these records become a smaller batch, divided as evenly as
    possible; a micro batch that would be empty repeats a record of this batch. Without ``keep_tail``, these records are dropped
    in this epoch.
    """

    def __init__(self, order: EpochOrder, num_records: int, geometry: BatchGeometry, keep_tail: bool) -> None:
        size = geometry.train_batch_size
        self.geometry = geometry
        self.num_tail_records = num_records % size
        self.keeps_tail = keep_tail and self.num_tail_records > 0
        self.epoch_length = num_records // size + (1 if self.keeps_tail else 0)
        if self.epoch_length == 0:
            raise DataError(
                f"the training loader has {num_records} records; expected at least one batch of {size} "
                f"({geometry.records_per_micro_batch} per micro batch x {geometry.micro_batches_per_batch} micro batches "
                f"x {geometry.num_replicas} replicas). Use more records or a smaller train_batch_size."
            )
        self._order = order
        self._epoch_idx = -1
        self._records: Sequence[Any] = ()
        self._block: Sequence[Any] = ()
        self._block_start = 0

    def records(self, batch_idx: int) -> list[Any]:
        """Return a global batch's records (the sampler's items), in order."""
        epoch_idx, batch_in_epoch = divmod(batch_idx, self.epoch_length)
        if epoch_idx != self._epoch_idx:
            self._records, self._block = self._order(epoch_idx), ()
            self._epoch_idx = epoch_idx
        size = self.geometry.train_batch_size
        start = batch_in_epoch * size - self._block_start
        if not 0 <= start < len(self._block):
            self._block_start = batch_in_epoch * size
            end = self._block_start + size * _BATCHES_PER_BLOCK
            self._block, start = self._records[self._block_start : end], 0
        return list(self._block[start : start + size])

    def num_records(self, first_batch: int, end_batch: int) -> int:
        """Return the number of records in batches ``first_batch`` to ``end_batch - 1``."""
        size = self.geometry.train_batch_size
        num_tails = (
            end_batch // self.epoch_length - first_batch // self.epoch_length if self.keeps_tail else 0
        )
        return (end_batch - first_batch) * size - num_tails * (size - self.num_tail_records)

    def micro_batch(self, records: Sequence[Any], micro_batch_idx: int, replica: int) -> list[Any]:
        """Return a replica's micro batch from a global batch's ``records``; never empty."""
        num_slices = self.geometry.num_slices
        slice_idx = micro_batch_idx * self.geometry.num_replicas + replica
        start, stop = (slice_idx * len(records) // num_slices, (slice_idx + 1) * len(records) // num_slices)
        if start == stop:
            start = slice_idx % len(records)
            stop = start + 1
        return list(records[start:stop])


class ReplicaSampler(data.Sampler[list[Any]]):
    """Batch sampler that yields one replica's micro batches endlessly.

    Args:
        replica: data-parallel rank.
        start_micro_batch: number of this replica's micro batches to skip.
        with_epoch: whether to yield ``(epoch_idx, record)`` instead of ``record``.
    """

    def __init__(
        self, batches: GlobalBatches, replica: int, start_micro_batch: int, with_epoch: bool
    ) -> None:
        self._batches = batches
        self._replica = replica
        self._start = start_micro_batch
        self._with_epoch = with_epoch

    def __iter__(self) -> Iterator[list[Any]]:
        batches, geometry = self._batches, self._batches.geometry
        first_batch, skipped = divmod(self._start, geometry.micro_batches_per_batch)
        for batch_idx in itertools.count(first_batch):
            records = batches.records(batch_idx)
            if self._with_epoch:
                epoch_idx = batch_idx // batches.epoch_length
                records = [(epoch_idx, record) for record in records]
            for idx in range(skipped, geometry.micro_batches_per_batch):
                yield batches.micro_batch(records, idx, self._replica)
            skipped = 0
