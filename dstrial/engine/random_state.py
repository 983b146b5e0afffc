"""Read, restore and serialise the state of this process's random generators."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


@dataclasses.dataclass(frozen=True, slots=True)
class RngState:
    """State of a process's random generators: Python, NumPy, torch, one accelerator."""

    of_python: Any
    of_numpy: Any
    of_torch: torch.Tensor
    of_device: torch.Tensor | None  # None without an accelerator

    @classmethod
    def read(cls, device: torch.device | None = None) -> RngState:
        """Read the generators of Python, NumPy, torch (CPU) and one accelerator.

        ``device`` selects the accelerator; for None or a CPU device, no accelerator is read.
        """
        of_device = None
        if device is not None and device.type != "cpu":
            of_device = _accelerator().get_rng_state(device.index)
        return cls(random.getstate(), np.random.get_state(legacy=True), torch.get_rng_state(), of_device)

    def restore(self, device: torch.device | None = None) -> None:
        random.setstate(self.of_python)
        np.random.set_state(self.of_numpy)
        torch.set_rng_state(self.of_torch)
        if self.of_device is not None and device is not None and device.type != "cpu":
            _accelerator().set_rng_state(self.of_device, device.index)

    def to_saved(self) -> dict[str, Any]:
        """Convert the state to values for a checkpoint; ``from_saved`` converts back.

        NumPy arrays become tensors, because ``safe_load`` rejects checkpoint files that contain NumPy arrays.
        """
        algorithm, keys, position, has_gauss, cached = self.of_numpy
        saved: dict[str, Any] = {
            "python": self.of_python,
            "numpy": (
                algorithm,
                torch.from_numpy(np.asarray(keys).astype(np.int64)),
                position,
                has_gauss,
                cached,
            ),
            "torch": self.of_torch,
        }
        return saved if self.of_device is None else {**saved, "device": self.of_device}

    @classmethod
    def from_saved(cls, saved: Mapping[str, Any]) -> RngState:
        algorithm, keys, *rest = saved["numpy"]
        numpy = (algorithm, keys.numpy().astype(np.uint32), *rest)
        return cls(saved["python"], numpy, saved["torch"], saved.get("device"))


def _accelerator() -> Any:
    from deepspeed.accelerator import get_accelerator  # loader workers do not import DeepSpeed

    return get_accelerator()
