"""Count the tokens of a micro batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def tokens_in(micro_batch: Any) -> int | None:
    """Return the elements of ``input_ids``, padding included; None without it.

    Other integer tensors are not assumed to be tokens.
    """
    if isinstance(micro_batch, (tuple, list)) and micro_batch and isinstance(micro_batch[0], Mapping):
        micro_batch = micro_batch[0]
    if not isinstance(micro_batch, Mapping):
        return None
    ids = micro_batch.get("input_ids")
    return ids.numel() if isinstance(ids, torch.Tensor) else None
