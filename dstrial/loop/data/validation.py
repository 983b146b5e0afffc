"""Read a rank's validation records in rounds, one per ``evaluate_batch`` call."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from determined import pytorch

from dstrial.engine.adapters.base import EngineAdapter
from dstrial.engine.adapters.validation_plan import ValidationRound
from dstrial.errors import DataError
from dstrial.loop.data.order import epoch_order
from dstrial.loop.data.passes import random_state_kept
from dstrial.loop.data.records import loader_length, require_determined_loader, torch_loader
from dstrial.ranks.startup_phase import begin_phase

logger = logging.getLogger("dstrial.loop")


def round_of(sizes: Sequence[int], is_ragged: bool) -> ValidationRound:
    """Return a validation round whose micro batches have ``sizes`` records.

    ``is_ragged``: whether a micro batch may be smaller than the loader's batch size.
    """
    stops = list(itertools.accumulate(sizes))
    ranges = tuple(zip([0, *stops[:-1]], stops, strict=True))
    return ValidationRound(record_ranges=ranges, records=stops[-1], is_ragged=is_ragged)


def unplanned_sizes(num_micro_batches: int, per_round: int) -> list[tuple[int, bool]]:
    """Divide micro batches of unknown size into validation rounds.

    Returns for each round: (number of micro batches, whether a micro batch may be smaller than the loader's batch size). Only
    the last micro batch may be smaller, and is a separate round.
    """
    full_rounds, rest = divmod(num_micro_batches - 1, per_round)
    sizes = [per_round] * full_rounds + ([rest] if rest else [])
    return [(size, False) for size in sizes] + [(1, True)]


@dataclasses.dataclass(frozen=True, slots=True)
class Extent:
    """A validation set's size: in records, or in micro batches of this replica."""

    num_records: int | None = None
    records_per_micro_batch: int | None = None
    num_micro_batches: int | None = None

    @property
    def is_empty(self) -> bool:
        return not self.num_records and not self.num_micro_batches


class ValidationStream:
    """Reads the validation records of this rank, round by round.

    Args:
        loader: the validation loader; None on ranks that read no records.
        all_replicas: whether all replicas must evaluate equally often, because a forward pass of any engine is collective.
        count_records: function that returns the number of records in one item of the loader.
    """

    def __init__(
        self,
        loader: Any,
        adapter: EngineAdapter,
        all_replicas: bool,
        seed: int,
        checks_disabled: bool,
        count_records: Callable[[Any], int],
    ) -> None:
        self._loader = loader
        self._adapter = adapter
        self._all_replicas = all_replicas
        self._seed = seed
        self._count_records = count_records
        self._kept: Any = None
        self.extent: Extent | None = None
        if isinstance(loader, pytorch.DataLoader) and loader.batch_size is not None:
            num_records = len(loader.sampler)
            if loader.drop_last:
                num_records -= num_records % loader.batch_size
            self.extent = Extent(num_records=num_records, records_per_micro_batch=loader.batch_size)
        elif isinstance(loader, pytorch.DataLoader):
            self.extent = Extent(num_micro_batches=len(self._dealt_batches()))
        elif loader is not None:
            require_determined_loader(loader, "build_validation_data_loader", checks_disabled)
            length = loader_length(loader)
            if length is None:
                length = self._counted()
            self.extent = Extent(num_micro_batches=length)

    def _counted(self) -> int:
        """Count the micro batches of a loader without ``__len__`` by reading it once."""
        if iter(self._loader) is self._loader:
            raise DataError(
                "the validation loader is an iterator without __len__; expected to know where validation ends, and to read it in "
                "each validation. Return a loader that can be iterated again, such as a DataLoader."
            )
        began_s = time.monotonic()
        begin_phase("counting the micro batches of the validation loader, which has no length")
        with random_state_kept():
            length = sum(1 for _ in self._loader)
        logger.info(
            "the validation loader has no length: counted %d micro batches in %.1f s",
            length,
            time.monotonic() - began_s,
        )
        return length

    def full_loader(self) -> Any:
        """Return a loader over all records, for ``evaluate_full_dataset`` on rank 0."""
        loader = self._loader
        if isinstance(loader, pytorch.DataLoader):
            return torch_loader(loader, loader.dataset, loader.batch_sampler, self._seed)
        return loader

    def rounds(self, agreed: Extent) -> Iterator[tuple[ValidationRound, Iterator[Any] | None]]:
        """Yield each round of this replica with an iterator over its micro batches.

        The iterator is None on a rank without loader. ``agreed`` is the validation set's size, on which all ranks have
        agreed. If this size is in micro batches, the length of this rank's loader is used instead.
        """
        if agreed.num_records is not None and agreed.records_per_micro_batch is not None:
            yield from self._planned(agreed.num_records, agreed.records_per_micro_batch)
        else:
            own = self.extent if self.extent is not None else agreed
            assert own.num_micro_batches is not None
            yield from self._unplanned(own.num_micro_batches)

    def _planned(
        self, num_records: int, records_per_micro_batch: int
    ) -> Iterator[tuple[ValidationRound, Iterator[Any] | None]]:
        rounds = self._adapter.validation_rounds(
            num_records, records_per_micro_batch, all_replicas=self._all_replicas
        )
        items = None
        if self._loader is not None:
            order = epoch_order(self._loader.sampler, len(self._loader.sampler), self._seed)(0)
            items = self._read(
                [
                    [order[position] for position in range(start, stop)]
                    for validation_round in rounds
                    for start, stop in validation_round.record_ranges
                ]
            )
        for validation_round in rounds:
            yield validation_round, items

    def _unplanned(self, num_micro_batches: int) -> Iterator[tuple[ValidationRound, Iterator[Any] | None]]:
        """Yield rounds like ``rounds``, if micro-batch sizes are known only after reading."""
        items = None
        if isinstance(self._loader, pytorch.DataLoader):
            items = self._read(self._dealt_batches())
        elif self._loader is not None:
            items = iter(self._loader)
        for size, is_ragged in unplanned_sizes(num_micro_batches, self._adapter.micro_batches_per_evaluation):
            held = list(itertools.islice(items, size)) if items is not None else []
            if items is not None and len(held) < size:
                raise DataError(
                    f"the validation loader ended before its length of {num_micro_batches} micro batches; expected as many in "
                    "each validation. Correct __len__, or drop it."
                )
            sizes = tuple(self._count_records(item) for item in held) or (1,) * size
            yield round_of(sizes, is_ragged=is_ragged), iter(held) if items is not None else None

    def _dealt_batches(self) -> list[Any]:
        batches = epoch_order(self._loader.batch_sampler, -1, self._seed)(0)
        return list(batches)[self._adapter.data_parallel_rank :: self._adapter.data_parallel_world_size]

    def _read(self, micro_batches: list[Any]) -> Iterator[Any]:
        """Yield loaded micro batches for lists of record indices."""
        if self._kept is not None:
            return iter(self._kept)
        loader = torch_loader(self._loader, self._loader.dataset, micro_batches, self._seed)
        if self._loader.persistent_workers:
            self._kept = loader
        return iter(loader)
