"""Let accelerate see the ranks of a job on CPUs.

Source: accelerate 1.15 ``PartialState._prepare_backend``: without an accelerator and without ``cpu=True`` it finds no backend,
and then takes every rank for a job of its own, whatever process group there is. Releases up to 1.10 took gloo.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed


@contextlib.contextmanager
def cpu_ranks() -> Iterator[None]:
    """Make accelerate count the ranks of a gloo process group while the block lasts; for Trainer and Accelerator alike.

    Does nothing where accelerate finds a backend itself, and on a single rank.

    Ranks: any; no communication.
    """
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    find = PartialState._prepare_backend

    @functools.wraps(find)
    def prepare_backend(self: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        backend, kind = find(self, *args, **kwargs)
        is_alone = not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1
        if is_alone or (backend is not None and kind is not DistributedType.NO):
            return backend, kind
        if torch.distributed.get_backend() != "gloo":
            return backend, kind
        return "gloo", DistributedType.MULTI_CPU

    PartialState._prepare_backend = prepare_backend
    try:
        yield
    finally:
        PartialState._prepare_backend = find
