"""Say how much data a training step pulls, and refuse loaders that hold less, before the first step."""

from __future__ import annotations

from collections.abc import Sequence

from dstrial.engine.adapter import EngineAdapter
from dstrial.errors import DataError


def micro_batches_needed(adapter: EngineAdapter) -> int:
    """Return how many micro batches one rank pulls from its loader for one optimizer step.

    Ranks: any; no communication. The number is the same on all ranks that read records.
    """
    return adapter.micro_batches_per_batch


def require_enough(lengths: Sequence[int | None], needed: int, *, loader: str) -> None:
    """Raise the same error on every rank when the loader of any rank is too short for one step.

    Args:
        lengths: micro batches in the loader of each rank, in rank order, gathered by the caller; None for
            a rank that reads no records or whose loader has no length.
        needed: micro batches that one step pulls, see ``micro_batches_needed``.
        loader: which loader it is, for the message, as in ``"training data loader"``.

    Raises:
        DataError: a rank holds fewer than ``needed``; names the ranks.

    Ranks: any, with the same arguments; no communication.
    """
    short = [(rank, length) for rank, length in enumerate(lengths) if length is not None and length < needed]
    if not short:
        return
    named = ", ".join(f"{length} on rank {rank}" for rank, length in short[:8])
    more = f" and {len(short) - 8} more ranks" if len(short) > 8 else ""
    raise DataError(
        f"{loader} is {named}{more} micro batches long; expected at least {needed} on every rank that reads "
        "records, one step's worth. Give it more records, or lower gradient_accumulation_steps or "
        "train_micro_batch_size_per_gpu."
    )
