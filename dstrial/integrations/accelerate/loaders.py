"""Read lengths and batch sizes of loaders that Accelerate has prepared."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from dstrial.config.batch import BATCH_KEYS
from dstrial.config.diagnostics import render
from dstrial.errors import ConfigError, ConfigProblem, DataError

logger = logging.getLogger("dstrial.integrations.accelerate")

_MICRO = BATCH_KEYS[1]


def epoch_length_of(loader: Any, micro_batches_per_batch: int) -> int:
    """Return the number of batches (optimizer steps) per epoch, at least 1.

    An incomplete last batch counts, unless the loader has ``drop_last``.

    Raises:
        DataError: the loader has no length, or less than one batch.
    """
    try:
        length = len(loader)
    except TypeError:
        raise DataError(
            f"reporter.batches(loader): the loader is a {type(loader).__name__} without a length; expected one with a length, "
            "by which a resume finds its place. Give its data set a __len__, or draw from it yourself and call reporter.step."
        ) from None
    found = length // micro_batches_per_batch
    if not _drops_last(loader):
        found = -(-length // micro_batches_per_batch)
    if found < 1:
        raise DataError(
            f"reporter.batches(loader): the loader has {length} micro batches; expected a whole batch, "
            f"{micro_batches_per_batch} micro batches. Pass more records."
        )
    return found


def micro_batch_of(accelerator: Any, own: int | None) -> int:
    """Return the micro batch size of the DeepSpeed config, or ``own`` if it is "auto".

    Raises:
        ConfigError: the config's value is "auto" and ``own`` is None.
    """
    size = accelerator.deepspeed_plugin.deepspeed_config.get(_MICRO)
    if isinstance(size, int):
        return size
    if own is None:
        fix = f"Set overwrite_deepspeed_args: {{{_MICRO}: 8}}, or call reporter.micro_batch_size(8)."
        raise ConfigError([ConfigProblem(f"deepspeed config: {_MICRO}", render(size), "a number", fix)])
    return own


def require_micro_batch(loaders: Iterable[Any], before: int | None, now: int) -> None:
    """Raise DataError if no loader has the micro batch size of the resumed run.

    ``before`` is the checkpoint's micro batch size (None for a new run), ``now`` that of the engine after the resume.
    ``loaders`` are all loaders that the accelerator has prepared.
    """
    sizes = {size for loader in loaders if (size := _batch_size(loader)) is not None}
    if before is not None and before != now and sizes and now not in sizes:
        raise DataError(
            f"the loaders read micro batches of {', '.join(map(str, sorted(sizes)))} records; expected {now}, with which "
            "these ranks share the run's batch. Make the training loader with batch_size=reporter.micro_batch_size()."
        )


def warn_of_unrepeatable_order(loader: Any, *, is_chief: bool) -> None:
    """Warn on rank 0 if ``loader`` shuffles by a sampler that a resume cannot repeat."""
    from accelerate.data_loader import SeedableRandomSampler
    from torch.utils.data import RandomSampler

    sampler = loader.get_sampler() if hasattr(loader, "get_sampler") else None
    if is_chief and isinstance(sampler, RandomSampler) and not isinstance(sampler, SeedableRandomSampler):
        logger.warning(
            "the training records are shuffled in an order that a resume cannot repeat; pass "
            "Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))"
        )


def _drops_last(loader: Any) -> bool:
    places = (loader, getattr(loader, "batch_sampler", None))
    return any(bool(getattr(place, name, False)) for place in places for name in ("drop_last", "_drop_last"))


def _batch_size(loader: Any) -> int | None:
    size = getattr(loader, "batch_size", None)
    if size is None:
        size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return size if isinstance(size, int) else None
