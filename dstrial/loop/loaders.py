"""The records of a run as iterators: training without end from any position, validation in planned rounds.

A ``determined.pytorch.DataLoader`` is taken apart: its data set, sampler and worker settings are used, its
own way of dealing batches to ranks is not, because that depends on the number of ranks. Any other loader
belongs to the user, who must have said so with ``context.disable_dataset_reproducibility_checks()``.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from determined import pytorch
from torch.utils import data

from dstrial.engine.adapter import EngineAdapter
from dstrial.engine.validation_plan import ValidationRound
from dstrial.errors import DataError, TrialContractError
from dstrial.loop.order import (
    BatchGeometry,
    GlobalBatches,
    ReplicaSampler,
    epoch_order,
    record_seed,
    seed_all,
)

logger = logging.getLogger("dstrial.loop")


class _SeededRecords(data.Dataset[Any]):
    """A data set read by ``(epoch_idx, record_idx)``, under random states of (seed, epoch, record).

    Used in loader workers only: they share no random state with training.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset = dataset
        self._seed = seed
        if hasattr(dataset, "__getitems__") and not isinstance(dataset, data.Subset):
            self.__getitems__ = self._read_together

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, key: tuple[int, Any]) -> Any:
        epoch_idx, record_idx = key
        seed_all(record_seed(self._seed, epoch_idx, record_idx if isinstance(record_idx, int) else 0))
        return self._dataset[record_idx]

    def _read_together(self, keys: Sequence[tuple[int, Any]]) -> Any:
        epoch_idx, record_idx = keys[0]
        seed_all(record_seed(self._seed, epoch_idx, record_idx if isinstance(record_idx, int) else 0))
        return self._dataset.__getitems__([record for _, record in keys])


class CountingIterator:
    """An endless iterator over micro batches that knows how many were drawn.

    Args:
        items: the micro batches.
        drawn: how many of this replica came before the first one.
        rank: this rank, for the message when the loader ends.
    """

    def __init__(self, items: Iterator[Any], drawn: int, rank: int) -> None:
        self._items = items
        self._rank = rank
        self.drawn = drawn

    def __iter__(self) -> CountingIterator:
        return self

    def __next__(self) -> Any:
        try:
            item = next(self._items)
        except StopIteration:
            raise DataError(
                f"the training loader of rank {self._rank} ended after {self.drawn} micro batches; expected records "
                "until the end of training. Give it a __len__ so that it is repeated, or make it repeat without end."
            ) from None
        self.drawn += 1
        return item


def _torch_loader(
    loader: pytorch.DataLoader, dataset: Any, batch_sampler: Any, seed: int
) -> data.DataLoader[Any]:
    """Build the torch loader that reads ``batch_sampler``'s records as ``loader`` would.

    It gets a generator of its own, because a loader without one draws from the training's random state
    every time it is started.
    """
    return data.DataLoader(
        dataset,
        batch_sampler=batch_sampler,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=torch.Generator().manual_seed(seed),
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )


def _require_determined_loader(loader: Any, method: str, checks_disabled: bool) -> None:
    if loader is not None and not checks_disabled:
        raise TrialContractError(
            f"{method} returned a {type(loader).__module__}.{type(loader).__name__}; expected dstrial.DataLoader, whose "
            "order is reproducible and resumable. Return one, or call context.disable_dataset_reproducibility_checks() "
            "in __init__ and take care of order, sharding and resuming yourself."
        )


def loader_length(loader: Any) -> int | None:
    """Return the micro batches in one pass over any loader; None if it does not say."""
    inner = loader.loader if type(loader).__name__ == "RepeatingLoader" else loader
    try:
        return len(inner)
    except TypeError:
        return None


class TrainingStream:
    """The training records of this rank.

    Args:
        loader: what ``build_training_data_loader`` returned on this rank; None on ranks that read no records.
        adapter: the adapter of the first wrapped engine.
        rank: this rank.
        seed: the trial's data seed.
        checks_disabled: whether any kind of loader is allowed.

    Raises:
        DataError: the loader holds too few records.
        TrialContractError: it is not a ``DataLoader`` and that was not allowed.
    """

    def __init__(
        self, loader: Any, adapter: EngineAdapter, rank: int, seed: int, checks_disabled: bool
    ) -> None:
        self._loader = loader
        self._rank = rank
        self._seed = seed
        self._replica = adapter.data_parallel_rank
        self._micro_batches_per_batch = adapter.micro_batches_per_batch
        self._full_batch_records = (
            adapter.micro_batch_size * adapter.micro_batches_per_batch * adapter.data_parallel_world_size
        )
        self._batches: GlobalBatches | None = None
        self.epoch_length: int | None = None
        self.notes: list[str] = []
        if isinstance(loader, pytorch.DataLoader):
            self._take_apart(loader, adapter)
        elif loader is not None:
            _require_determined_loader(loader, "build_training_data_loader", checks_disabled)
            length = loader_length(loader)
            if length is not None:
                self.epoch_length = length // adapter.micro_batches_per_batch
                if self.epoch_length == 0:
                    raise DataError(
                        f"the training loader of rank {rank} has {length} micro batches; expected at least "
                        f"{adapter.micro_batches_per_batch}, the micro batches of one batch. Use more records or "
                        "fewer gradient_accumulation_steps."
                    )

    def _take_apart(self, loader: pytorch.DataLoader, adapter: EngineAdapter) -> None:
        if loader.batch_size is None:
            order = epoch_order(loader.batch_sampler, -1, self._seed)
            geometry = BatchGeometry(1, adapter.micro_batches_per_batch, adapter.data_parallel_world_size)
            self._batches = GlobalBatches(order, len(loader.batch_sampler), geometry, keep_tail=False)
        else:
            num_records = len(loader.sampler)
            order = epoch_order(loader.sampler, num_records, self._seed)
            geometry = BatchGeometry(
                loader.batch_size, adapter.micro_batches_per_batch, adapter.data_parallel_world_size
            )
            keep_tail = not loader.drop_last and adapter.sends_ragged_micro_batches
            self._batches = GlobalBatches(order, num_records, geometry, keep_tail)
            if loader.batch_size != adapter.micro_batch_size:
                self.notes.append(
                    f"the training loader reads {loader.batch_size} records per micro batch, but the engine's "
                    f"train_micro_batch_size_per_gpu is {adapter.micro_batch_size}; the loader's number is used"
                )
        self._note_tail(loader)
        self.epoch_length = self._batches.epoch_length

    def _note_tail(self, loader: pytorch.DataLoader) -> None:
        assert self._batches is not None
        tail, size = self._batches.num_tail_records, self._batches.geometry.train_batch_size
        if not tail:
            return
        unit = "batches of the batch sampler" if loader.batch_size is None else "records"
        if self._batches.keeps_tail:
            self.notes.append(f"the last batch of every epoch holds {tail} of {size} records")
            num_slices = self._batches.geometry.num_slices
            if tail < num_slices:
                self.notes.append(
                    f"to give each of its {num_slices} micro batches a record, that batch repeats {num_slices - tail}"
                )
        else:
            self.notes.append(
                f"{tail} {unit} at the end of every epoch do not fill a batch of {size} and are not trained"
            )

    def count_records(self, first_batch: int, end_batch: int) -> int:
        """Return the records of a stretch of global batches; for loaders of the user's own, if all are full."""
        if self._batches is not None and self._loader.batch_size is not None:
            return self._batches.num_records(first_batch, end_batch)
        return (end_batch - first_batch) * self._full_batch_records

    def open(self, drawn: int) -> CountingIterator | None:
        """Start reading.

        Args:
            drawn: how many micro batches of this replica were drawn before.

        Returns:
            The iterator, or None on ranks that read no records.
        """
        if self._loader is None:
            return None
        if self._batches is None:
            return CountingIterator(self._skip(drawn), drawn, self._rank)
        loader = self._loader
        in_workers = loader.num_workers > 0
        own_batches = loader.batch_size is None
        micro_batches = ReplicaSampler(
            self._batches, self._replica, drawn, with_epoch=in_workers and not own_batches
        )
        sampler = _Flattened(micro_batches) if own_batches else micro_batches
        dataset = (
            _SeededRecords(loader.dataset, self._seed) if in_workers and not own_batches else loader.dataset
        )
        return CountingIterator(iter(_torch_loader(loader, dataset, sampler, self._seed)), drawn, self._rank)

    def _skip(self, drawn: int) -> Iterator[Any]:
        if drawn:
            length = loader_length(self._loader)
            to_skip = drawn % length if length else drawn
            logger.warning(
                "the training loader is not dstrial.DataLoader: it is resumed by reading and dropping %d micro batches, "
                "and its order is as reproducible as the loader itself",
                to_skip,
            )
            items = self._repeat()
            for _ in range(to_skip):
                next(items)
            return items
        return self._repeat()

    def _repeat(self) -> Iterator[Any]:
        if loader_length(self._loader) is None or type(self._loader).__name__ == "RepeatingLoader":
            return iter(self._loader)
        return itertools.chain.from_iterable(itertools.repeat(self._loader))


def round_of(sizes: Sequence[int], is_ragged: bool) -> ValidationRound:
    """Return the round of micro batches whose sizes are known only now.

    Args:
        sizes: records of each micro batch.
        is_ragged: whether the shape may differ from other rounds'.
    """
    stops = list(itertools.accumulate(sizes))
    ranges = tuple(zip([0, *stops[:-1]], stops, strict=True))
    return ValidationRound(record_ranges=ranges, records=stops[-1], is_ragged=is_ragged)


class _Flattened(data.Sampler[Any]):
    """Micro batches of a user's batch sampler: each ``[batch]`` that a replica is dealt, as the batch itself."""

    def __init__(self, sampler: ReplicaSampler) -> None:
        self._sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        for micro_batch in self._sampler:
            yield micro_batch[0]


class ValidationStream:
    """The validation records of this rank, in rounds; one round is one call of ``evaluate_batch``.

    Args:
        loader: what ``build_validation_data_loader`` returned on this rank; None on ranks that read no records.
        adapter: the adapter of the first wrapped engine.
        seed: the trial's data seed.
        checks_disabled: whether any kind of loader is allowed.
        count_records: returns the number of records in one item of the loader.

    Raises:
        TrialContractError: the loader is not a ``DataLoader`` and that was not allowed.
    """

    def __init__(
        self,
        loader: Any,
        adapter: EngineAdapter,
        seed: int,
        checks_disabled: bool,
        count_records: Callable[[Any], int],
    ) -> None:
        self._loader = loader
        self._adapter = adapter
        self._seed = seed
        self._count_records = count_records
        self.num_records: int | None = None
        self.records_per_micro_batch: int | None = None
        self.num_micro_batches: int | None = None
        if isinstance(loader, pytorch.DataLoader) and loader.batch_size is not None:
            self.num_records = len(loader.sampler)
            if loader.drop_last:
                self.num_records -= self.num_records % loader.batch_size
            self.records_per_micro_batch = loader.batch_size
        elif isinstance(loader, pytorch.DataLoader):
            self.num_micro_batches = len(list(self._dealt_batches(loader)))
        elif loader is not None:
            _require_determined_loader(loader, "build_validation_data_loader", checks_disabled)
            self.num_micro_batches = loader_length(loader)
            if self.num_micro_batches is None:
                raise DataError(
                    "the validation loader has no __len__; expected to know where validation ends. Give it one."
                )

    def _dealt_batches(self, loader: pytorch.DataLoader) -> Iterator[Any]:
        batches = epoch_order(loader.batch_sampler, -1, self._seed)(0)
        return itertools.islice(
            iter(batches), self._adapter.data_parallel_rank, None, self._adapter.data_parallel_world_size
        )

    def full_loader(self) -> Any:
        """Return a loader over every validation record, for ``evaluate_full_dataset`` on the chief."""
        loader = self._loader
        return loader.get_data_loader(repeat=False) if isinstance(loader, pytorch.DataLoader) else loader

    def planned(
        self, num_records: int, records_per_micro_batch: int
    ) -> tuple[tuple[ValidationRound, ...], Iterator[Any] | None]:
        """Return the rounds of this replica and an iterator over their micro batches.

        Args:
            num_records: records in the validation set, agreed by all ranks.
            records_per_micro_batch: the loader's batch size, agreed by all ranks.
        """
        rounds = self._adapter.validation_rounds(num_records, records_per_micro_batch)
        if self._loader is None:
            return rounds, None
        order = epoch_order(self._loader.sampler, len(self._loader.sampler), self._seed)(0)
        micro_batches = [
            [order[position] for position in range(start, stop)]
            for validation_round in rounds
            for start, stop in validation_round.record_ranges
        ]
        return rounds, iter(_torch_loader(self._loader, self._loader.dataset, micro_batches, self._seed))

    def unplanned(
        self, num_micro_batches: int, per_round: int
    ) -> Iterator[tuple[ValidationRound, Iterator[Any] | None]]:
        """Yield rounds over a loader whose sizes are known only when they are read.

        The last micro batch gets a round of its own, because it may hold fewer records.

        Args:
            num_micro_batches: micro batches of each replica, agreed by all ranks.
            per_round: micro batches per call of ``evaluate_batch``.
        """
        items = None
        if isinstance(self._loader, pytorch.DataLoader):
            sampler = list(self._dealt_batches(self._loader))
            items = iter(_torch_loader(self._loader, self._loader.dataset, sampler, self._seed))
        elif self._loader is not None:
            items = iter(self._loader)
        full_rounds, rest = divmod(num_micro_batches - 1, per_round)
        for size in [per_round] * full_rounds + ([rest] if rest else []) + [1]:
            is_last = size == 1 and per_round > 1
            held = list(itertools.islice(items, size)) if items is not None else []
            sizes = tuple(self._count_records(item) for item in held) or (1,) * size
            yield (
                round_of(sizes, is_ragged=is_last),
                iter(held) if items is not None else None,
            )
