"""What a loop needs of the loaders that Accelerate has prepared."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from dstrial.errors import DataError

logger = logging.getLogger("dstrial.integrations.accelerate")


def length_of(loader: Any) -> int:
    """Return the micro batches of one epoch on this rank, at least 1.

    Raises:
        DataError: the loader has no length, or no micro batch.
    """
    try:
        length = len(loader)
    except TypeError:
        raise DataError(
            f"reporter.batches(loader): the loader is a {type(loader).__name__} without a length; expected one with a length, "
            "by which a resume finds its place. Give its data set a __len__, or draw from it yourself and call reporter.step."
        ) from None
    if length < 1:
        raise DataError(
            "reporter.batches(loader): the loader has no micro batch; expected at least one. Pass a data set with records."
        )
    return length


def require_micro_batch(loaders: Iterable[Any], before: int | None, now: int) -> None:
    """Refuse loaders that still read the micro batch of before, where the run's batch is shared otherwise now.

    Args:
        loaders: all that the accelerator has prepared; one of them is the training loader.
        before: micro batch with which the checkpoint was written; None if that is not known.
        now: micro batch of the engine.

    Raises:
        DataError: none of them reads it.
    """
    sizes = {size for loader in loaders if (size := _batch_size(loader)) is not None}
    if before is not None and before != now and sizes and now not in sizes:
        raise DataError(
            f"the loaders read micro batches of {', '.join(map(str, sorted(sizes)))} records; expected {now}, with which "
            "these ranks share the run's batch. Make the training loader with "
            'batch_size=accelerator.deepspeed_plugin.deepspeed_config["train_micro_batch_size_per_gpu"].'
        )


def warn_of_unrepeatable_order(loader: Any, *, is_chief: bool) -> None:
    """Say once that a loader shuffles in an order that a resume cannot repeat.

    Args:
        loader: the training loader.
        is_chief: whether this rank says it.
    """
    from accelerate.data_loader import SeedableRandomSampler
    from torch.utils.data import RandomSampler

    sampler = loader.get_sampler() if hasattr(loader, "get_sampler") else None
    if is_chief and isinstance(sampler, RandomSampler) and not isinstance(sampler, SeedableRandomSampler):
        logger.warning(
            "the training records are shuffled in an order that a resume cannot repeat; pass "
            "Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))"
        )


def _batch_size(loader: Any) -> int | None:
    size = getattr(loader, "batch_size", None)
    if size is None:
        size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return size if isinstance(size, int) else None
