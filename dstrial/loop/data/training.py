"""Read a rank's training micro batches endlessly, starting at any position."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from determined import pytorch
from torch.utils import data

from dstrial.engine.adapters.base import EngineAdapter
from dstrial.errors import DataError
from dstrial.loop.data.order import BatchGeometry, GlobalBatches, ReplicaSampler, epoch_order
from dstrial.loop.data.passes import LoaderPasses, ResumeMode, position_for
from dstrial.loop.data.records import SeededRecords, loader_length, require_determined_loader, torch_loader


class CountingIterator:
    """An endless iterator over micro batches that counts them.

    Attributes:
        drawn: number of micro batches that this replica has drawn in the run.
        watch: callback that receives each micro batch and the seconds that the loader took; None for no callback.
    """

    def __init__(self, items: Iterator[Any], drawn: int, rank: int, per_batch: int) -> None:
        self._items = items
        self._rank = rank
        self._per_batch = per_batch
        self.drawn = drawn
        self.watch: Callable[[Any, float], None] | None = None

    def __iter__(self) -> CountingIterator:
        return self

    def __next__(self) -> Any:
        began_s = time.perf_counter()
        try:
            item = next(self._items)
        except StopIteration:
            raise DataError(
                f"the training loader of rank {self._rank} ended in batch {self.drawn // self._per_batch}, after "
                f"{self.drawn} micro batches, and a new iterator over it has none; expected records until the end of training. "
                "Return a loader that can be iterated again, such as a DataLoader, instead of a generator."
            ) from None
        except RuntimeError as error:
            if "DataLoader timed out" not in str(error):
                raise
            raise DataError(
                f"a training loader worker of rank {self._rank} has answered nothing in batch "
                f"{self.drawn // self._per_batch} ({error}); expected records. Look at what the data set waits for, or set the "
                "loader's timeout or DSTRIAL_TIMEOUT_S (seconds)."
            ) from error
        self.drawn += 1
        if self.watch is not None:
            self.watch(item, time.perf_counter() - began_s)
        return item


class TrainingStream:
    """Reads this rank's training records.

    ``loader`` is None on ranks that read no records. ``notes`` has sentences for the log, for example about dropped records.
    """

    def __init__(
        self,
        loader: Any,
        adapter: EngineAdapter,
        rank: int,
        seed: int,
        checks_disabled: bool,
        resume_mode: ResumeMode = "exact",
    ) -> None:
        self._loader = loader.loader if type(loader).__name__ == "RepeatingLoader" else loader
        self._rank = rank
        self._seed = seed
        self._resume_mode = resume_mode
        self._replica = adapter.data_parallel_rank
        self._micro_batches_per_batch = adapter.micro_batches_per_batch
        self._division = (
            adapter.data_parallel_world_size,
            adapter.micro_batches_per_batch,
            adapter.micro_batch_size,
        )
        self._full_batch_records = math.prod(self._division)
        self._batches: GlobalBatches | None = None
        self.passes: LoaderPasses | None = None
        self.epoch_length: int | None = None
        self.notes: list[str] = []
        if isinstance(loader, pytorch.DataLoader):
            self._take_apart(loader, adapter)
        elif loader is not None:
            require_determined_loader(loader, "build_training_data_loader", checks_disabled)
            self.passes = self._in_passes(loader_length(self._loader))

    def _in_passes(self, length: int | None) -> LoaderPasses:
        """Return an iterator that repeats the user's own loader; set ``epoch_length``.

        ``length`` is the loader's number of micro batches. If it is None, ``epoch_length`` stays None.
        """
        if length is None:
            return LoaderPasses(self._loader, None, 0, self._rank)
        self.epoch_length, rest = divmod(length, self._micro_batches_per_batch)
        if self.epoch_length == 0:
            raise DataError(
                f"the training loader of rank {self._rank} has {length} micro batches; expected at least "
                f"{self._micro_batches_per_batch}, the micro batches of one batch. Use more records or "
                "fewer gradient_accumulation_steps."
            )
        if rest:
            self.notes.append(
                f"{rest} micro batches at the end of every pass do not fill a batch and are not trained"
            )
        return LoaderPasses(self._loader, length - rest, rest, self._rank)

    def _take_apart(self, loader: pytorch.DataLoader, adapter: EngineAdapter) -> None:
        has_own_batches = loader.batch_size is None
        sampler = loader.batch_sampler if has_own_batches else loader.sampler
        geometry = BatchGeometry(
            1 if has_own_batches else loader.batch_size,
            adapter.micro_batches_per_batch,
            adapter.data_parallel_world_size,
        )
        keep_tail = not (has_own_batches or loader.drop_last) and adapter.sends_ragged_micro_batches
        order = epoch_order(sampler, -1 if has_own_batches else len(sampler), self._seed)
        self._batches = GlobalBatches(order, len(sampler), geometry, keep_tail)
        self.epoch_length = self._batches.epoch_length
        if not has_own_batches and loader.batch_size != adapter.micro_batch_size:
            self.notes.append(
                f"the training loader reads {loader.batch_size} records per micro batch, but the engine's "
                f"train_micro_batch_size_per_gpu is {adapter.micro_batch_size}; the loader's number is used"
            )
        if tail := self._batches.num_tail_records:
            unit = "batches of the batch sampler" if has_own_batches else "records"
            what = "form a smaller batch" if self._batches.keeps_tail else "are not trained"
            self.notes.append(
                f"{tail} {unit} at the end of every epoch do not fill a batch of {geometry.train_batch_size} and {what}"
            )

    @property
    def records_per_batch(self) -> int | None:
        """Records of a full batch over all replicas; None if the batch size is unknown."""
        if self._batches is None or self._loader.batch_size is None:
            return None
        return self._batches.geometry.train_batch_size

    def count_records(self, first_batch: int, end_batch: int) -> int:
        """Return the number of records in batches ``first_batch`` to ``end_batch - 1``.

        Without a known batch size (``records_per_batch``), every batch counts as full.
        """
        if self._batches is not None and self._loader.batch_size is not None:
            return self._batches.num_records(first_batch, end_batch)
        return (end_batch - first_batch) * self._full_batch_records

    def open(self, drawn: int, saved: Sequence[Mapping[str, Any]] = ()) -> CountingIterator | None:
        """Return an iterator over the micro batches after the first ``drawn``.

        None on a rank without loader. ``saved`` has ``positions()`` from the checkpoint: this rank's position or, if the rank
        layout has changed, the positions of all saved ranks.

        Raises:
            DataError: the position of a user's own loader cannot be restored.
        """
        if self._loader is None:
            return None
        if drawn and (self._batches is None) != bool(saved):
            raise DataError(
                "the checkpoint was written with a training loader that is "
                f"{'not ' if saved else ''}dstrial.DataLoader, and now it is {'' if saved else 'not '}one; expected the same "
                "kind. Restore the loader, or start a new run from the checkpoint's weights."
            )
        if self._batches is None:
            assert self.passes is not None
            if saved:
                self.passes.restore(*position_for(saved, self._division, self._replica, self._resume_mode))
            return CountingIterator(self.passes, drawn, self._rank, self._micro_batches_per_batch)
        loader = self._loader
        in_workers = loader.num_workers > 0
        sampler: data.Sampler[Any] = ReplicaSampler(self._batches, self._replica, drawn, in_workers)
        if loader.batch_size is None:
            sampler = _Flattened(sampler, in_workers)
        dataset = SeededRecords(loader.dataset, self._seed) if in_workers else loader.dataset
        return CountingIterator(
            iter(torch_loader(loader, dataset, sampler, self._seed)),
            drawn,
            self._rank,
            self._micro_batches_per_batch,
        )

    def positions(self) -> list[dict[str, Any]]:
        """Return a list of one position in a user's own loader, for a checkpoint.

        The list is empty for a ``dstrial.DataLoader``, whose position follows from the number of micro batches drawn.
        """
        if self.passes is None:
            return []
        return [{**self.passes.position(), "replica": self._replica, "division": self._division}]

    def close(self) -> None:
        """Release a user's own loader; nothing can be read afterwards."""
        if self.passes is not None:
            self.passes.close()
            self._loader = None


class _Flattened(data.Sampler[Any]):
    """Yields each batch of a user's batch sampler as one micro batch."""

    def __init__(self, sampler: data.Sampler[Any], with_epoch: bool) -> None:
        self._sampler = sampler
        self._with_epoch = with_epoch

    def __iter__(self) -> Iterator[Any]:
        for (dealt,) in self._sampler:
            if self._with_epoch:
                epoch_idx, batch = dealt
                yield [(epoch_idx, record) for record in batch]
            else:
                yield dealt


def agreed_epoch_length(gathered: Sequence[tuple[bool, bool, int | None, str | None]]) -> int | None:
    """Return the ranks' common number of batches per epoch; None if unknown.

    Args:
        gathered: for each rank (whether the rank must read records, whether it has a loader, the loader's batches per epoch or
            None, error text or None).

    Raises:
        DataError: a loader is missing or too short, or lengths differ. Every rank raises the same error.
    """
    errors = [(rank, error) for rank, (_, _, _, error) in enumerate(gathered) if error]
    if errors:
        raise DataError(f"rank {errors[0][0]}: {errors[0][1]}")
    readers = {rank: length for rank, (_, has_loader, length, _) in enumerate(gathered) if has_loader}
    without = [
        rank for rank, (must_read, has_loader, _, _) in enumerate(gathered) if must_read and not has_loader
    ]
    if not readers or without:
        where = f"on rank {without[0]}" if readers else "on every rank that reads records"
        raise DataError(f"build_training_data_loader returned None {where}; expected a loader. Return one.")
    if len(set(readers.values())) > 1:
        listed = ", ".join(f"rank {rank}: {length}" for rank, length in readers.items())
        raise DataError(
            f"training loaders differ in length: batches per epoch are {listed}; expected the same on all ranks. Build the "
            "same loader on every rank, or shard evenly."
        )
    return next(iter(readers.values()))
