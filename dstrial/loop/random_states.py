"""The random states of a rank: Python's, NumPy's, torch's and its device's."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def random_states(device: torch.device) -> dict[str, Any]:
    """Return the random states of this process and of its device. Ranks: any; no communication."""
    algorithm, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (
            algorithm,
            torch.from_numpy(np.asarray(keys).astype(np.int64)),
            position,
            has_gauss,
            cached,
        ),
        "torch": torch.random.get_rng_state(),
    }
    if device.type != "cpu":
        states["device"] = _accelerator().get_rng_state(device.index)
    return states


def restore_random_states(states: Mapping[str, Any], device: torch.device) -> None:
    """Put this process's random states back. Ranks: any; no communication."""
    random.setstate(states["python"])
    algorithm, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((algorithm, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.random.set_rng_state(states["torch"])
    if device.type != "cpu" and "device" in states:
        _accelerator().set_rng_state(states["device"], device.index)


def _accelerator() -> Any:
    from deepspeed.accelerator import get_accelerator

    return get_accelerator()
