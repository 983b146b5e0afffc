"""Check whether tensors, process groups, threads, files or memory have grown."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import threading
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from deepspeed.accelerator import get_accelerator


@dataclasses.dataclass(frozen=True, slots=True)
class ProcessUsage:
    """The resources of a process."""

    num_tensors: int  # with memory, that Python knows of
    tensor_bytes: int  # of their storages, each counted once
    num_groups: int
    num_threads: int
    num_files: int
    device_bytes: int  # 0 on the CPU
    resident_bytes: int  # RSS

    def grown_over(self, baseline: ProcessUsage) -> list[str]:
        """Return what there is more of than in a warmed-up process.

        RSS that an allocator keeps for later does not count below a quarter, nor does 1 MiB of tensors.
        """
        slack = {
            "num_tensors": 64,
            "tensor_bytes": 2**20,
            "num_groups": 0,
            "num_threads": 2,
            # An NCCL communicator opens sockets and shared memory, and keeps some for the next (its proxy, its bootstrap).
            "num_files": 64 if has_device() else 8,
            "device_bytes": 2**21,
            "resident_bytes": max(2**28, baseline.resident_bytes // 4),
        }
        grown = []
        for name, allowed in slack.items():
            now, before = getattr(self, name), getattr(baseline, name)
            if now > before + allowed:
                grown.append(f"{name} {before} -> {now}")
        return grown


def process_usage() -> ProcessUsage:
    """Return the resources that this process holds now."""
    storages: dict[int, int] = {}
    num_tensors = 0
    with warnings.catch_warnings():
        # Looking at every object there is calls properties of deprecated ones.
        warnings.simplefilter("ignore")
        for one in gc.get_objects():
            if not isinstance(type(one), type) or not issubclass(type(one), torch.Tensor):
                continue
            with contextlib.suppress(RuntimeError, NotImplementedError, AttributeError, ReferenceError):
                storage = one.untyped_storage()
                if storage.nbytes():
                    num_tensors += 1
                    storages[storage.data_ptr()] = storage.nbytes()
    return ProcessUsage(
        num_tensors=num_tensors,
        tensor_bytes=sum(storages.values()),
        num_groups=len(process_groups()),
        num_threads=threading.active_count(),
        num_files=_num_files(),
        device_bytes=int(get_accelerator().memory_allocated()) if has_device() else 0,
        resident_bytes=_resident_bytes(),
    )


def reset_host_peak() -> None:
    """Restart the kernel's count of peak memory (VmHWM); no effect if it may not."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def process_groups() -> list[Any]:
    """Return this process's groups in the order in which they were made."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return []
    return list(torch.distributed.distributed_c10d._world.pg_map)


def has_device() -> bool:
    return str(get_accelerator().device_name()) != "cpu"


def _num_files() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208  # counts, the listing's own descriptor included
    except OSError:
        return 0


def _resident_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
