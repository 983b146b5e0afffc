"""``DataLoader`` with pinned memory; asynchronous copies to a device."""

from __future__ import annotations

import inspect
import os
from typing import Any

import numpy as np
import torch
from determined import pytorch
from torch.nn.utils.rnn import PackedSequence

from dstrial.ranks.process_group import has_accelerator, num_torch_accelerators

_SIGNATURE = inspect.signature(pytorch.DataLoader)


class DataLoader(pytorch.DataLoader):  # type: ignore[misc]  # determined ships no types
    """Determined's ``DataLoader``, which pins memory if there is an accelerator.

    ``context.to_device`` copies pinned memory while the device computes. Arguments and their defaults are those of
    ``determined.pytorch.DataLoader``, except for the default of ``pin_memory``.
    """

    __signature__ = _SIGNATURE.replace(
        parameters=[
            one.replace(default=None) if one.name == "pin_memory" else one
            for one in _SIGNATURE.parameters.values()
        ]
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = _SIGNATURE.bind(*args, **kwargs)
        if given.arguments.get("pin_memory") is None:
            given.arguments["pin_memory"] = should_pin()
        super().__init__(*given.args, **given.kwargs)


def should_pin() -> bool:
    """Return whether torch has an accelerator for which pinned memory is useful.

    False on MPS. Source: torch 2.13 ``utils/data/dataloader.py`` warns of ``pin_memory=True`` without an accelerator.
    """
    if not has_accelerator(os.environ) or not num_torch_accelerators():
        return False
    found = torch.accelerator.current_accelerator()
    return found is not None and found.type != "mps"


def to_device(value: Any, device: torch.device, warned_types: set[type]) -> Any:
    """Move tensors and arrays, nested in lists, tuples and dicts, to a device.

    Tensors in pinned memory are copied asynchronously; work that is enqueued later on the device waits for the copy. Other
    objects are moved by their ``to`` method, if they have one. Otherwise they are returned unchanged, with one warning per type,
    which is then added to ``warned_types``.
    """
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=_is_pinned(value, device))
    if isinstance(value, dict):
        return {key: to_device(item, device, warned_types) for key, item in value.items()}
    if isinstance(value, list):
        return [to_device(item, device, warned_types) for item in value]
    if isinstance(value, PackedSequence):
        packed: Any = value  # torch's type hints do not accept a torch.device here
        return packed.to(device, non_blocking=_is_pinned(value.data, device))
    if isinstance(value, tuple):
        moved = (to_device(item, device, warned_types) for item in value)
        return type(value)(*moved) if hasattr(value, "_fields") else tuple(moved)
    if isinstance(value, np.ndarray) and value.dtype.kind in "fciub":
        return torch.from_numpy(value).to(device)
    if callable(getattr(value, "to", None)):
        return value.to(device)
    return pytorch.to_device(value, device, warned_types)  # returns the value and logs the warning


def _is_pinned(tensor: torch.Tensor, device: torch.device) -> bool:
    # False for copies to the CPU: the host could read the target before an asynchronous copy is complete.
    return device.type != "cpu" and tensor.device.type == "cpu" and tensor.is_pinned()
