"""Build torch loaders that read a user's data set with reproducible random states.

The settings of a ``determined.pytorch.DataLoader`` apply, except the sharding, which depends on the number of ranks.
"""

from __future__ import annotations

import operator
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from determined import pytorch
from torch.utils import data

from dstrial.loop.data.order import record_seed, seed_all
from dstrial.ranks.control_channel import timeout_from_environ
from dstrial.trial.determined_errors import ForeignLoaderError


class SeededRecords(data.Dataset[Any]):
    """Wraps a data set; seeds random states by (seed, epoch, record) before each read.

    Used only in loader workers, whose random states are separate from training.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset = dataset
        self._seed = seed
        if hasattr(dataset, "__getitems__") and not isinstance(dataset, data.Subset):
            self.__getitems__ = self._read_together

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: tuple[int, Any]) -> Any:
        epoch_idx, record = key
        seed_all(record_seed(self._seed, epoch_idx, _record_number(record)))
        return self.dataset[record]

    def _read_together(self, keys: Sequence[tuple[int, Any]]) -> Any:
        epoch_idx, record = keys[0]
        seed_all(record_seed(self._seed, epoch_idx, _record_number(record)))
        return self.dataset.__getitems__([record for _, record in keys])


def _record_number(record: Any) -> int:
    try:
        return operator.index(record)
    except TypeError:
        return zlib.crc32(repr(record).encode())


class _WorkerStart:
    """Worker init function that hides ``SeededRecords`` from the user's code.

    Sets ``get_worker_info().dataset`` to the user's data set, then calls the user's ``worker_init_fn``.
    """

    def __init__(self, worker_init_fn: Callable[[int], None] | None) -> None:
        self._worker_init_fn = worker_init_fn

    def __call__(self, worker_idx: int) -> None:
        info: Any = data.get_worker_info()
        if isinstance(info.dataset, SeededRecords):
            object.__setattr__(info, "dataset", info.dataset.dataset)  # `info` rejects normal assignment
        if self._worker_init_fn is not None:
            self._worker_init_fn(worker_idx)


def torch_loader(
    loader: pytorch.DataLoader, dataset: Any, batch_sampler: Any, seed: int
) -> data.DataLoader[Any]:
    """Build a torch loader for ``batch_sampler`` with the settings of ``loader``.

    The loader gets a generator, because otherwise each iterator would draw from training's random state. Without a ``timeout``
    of the user, workers get the timeout for communication between ranks.
    """
    return data.DataLoader(
        dataset,
        batch_sampler=batch_sampler,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout or (timeout_from_environ() if loader.num_workers else 0),
        worker_init_fn=_WorkerStart(loader.worker_init_fn) if loader.num_workers else None,
        multiprocessing_context=loader.multiprocessing_context,
        generator=torch.Generator().manual_seed(seed),
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )


def require_determined_loader(loader: Any, method: str, checks_disabled: bool) -> None:
    if loader is not None and not checks_disabled:
        raise ForeignLoaderError(
            f"{method} returned a {type(loader).__module__}.{type(loader).__name__}; expected dstrial.DataLoader, whose "
            "order gives reproducibility and can be resumed. Return one. If not, you can disable this check by calling "
            "context.disable_dataset_reproducibility_checks() in __init__: order and sharding are then yours "
            "(docs/how-to/data.md)."
        )


def loader_length(loader: Any) -> int | None:
    """Return a loader's number of micro batches in one pass; None without ``__len__``."""
    inner = loader.loader if type(loader).__name__ == "RepeatingLoader" else loader
    try:
        return len(inner)
    except TypeError:
        return None
