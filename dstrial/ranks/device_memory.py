"""How much memory a device has left, where DeepSpeed cannot ask for it."""

from __future__ import annotations

import os
from typing import Any

import torch.cuda

from dstrial.engine.deepspeed_internals import process


def ask_torch_for_free_memory() -> None:
    """Have DeepSpeed ask torch for free memory where devices are named by UUIDs.

    ZeRO 1 and 2 ask for it. DeepSpeed 0.19.8 (``cuda_accelerator.py:188``) takes the variable's words for integers, in order to
    ask NVML; a MIG instance has a UUID only, and users name whole devices by theirs as well.

    Ranks: each its own; no communication.
    """
    words = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if all(word.strip().isdecimal() for word in words) or words == [""]:
        return
    process.replace_available_memory(_available_memory)


def _available_memory(_accelerator: Any, device_index: int | None = None) -> int:
    free_bytes, _ = torch.cuda.mem_get_info(device_index)
    return int(free_bytes)
