"""Destroy engines, and restore the process to its state before the first engine.

Each step undoes something that DeepSpeed 0.19.8 or torch leaves behind. ``ProcessUsage`` measures what still remains, so that
the search can replace ranks that leak.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import gc
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from deepspeed.accelerator import get_accelerator
from torch import nn

from dstrial.engine.deepspeed_internals import process

# Namespaces that DeepSpeed patches: ZeRO 3 replaces torch.nn.functional.linear for good.
_PATCHED = (torch, torch.nn.functional, torch.nn.init, nn.Module, nn.Linear, nn.Embedding, torch.Tensor)
# Numeric settings below ``torch.backends`` in the order in which they are restored: the older names change the newer ones.
_BACKEND_SETTINGS = (
    *("cudnn.enabled", "cudnn.benchmark", "cudnn.benchmark_limit", "cudnn.deterministic", "cudnn.allow_tf32"),
    *("cuda.matmul.allow_tf32", "cuda.matmul.allow_fp16_accumulation"),
    "cuda.matmul.allow_fp16_reduced_precision_reduction",
    "cuda.matmul.allow_bf16_reduced_precision_reduction",
    # torch 2.9 and later
    *("fp32_precision", "cuda.matmul.fp32_precision"),
    *("cudnn.fp32_precision", "cudnn.conv.fp32_precision", "cudnn.rnn.fp32_precision"),
    *("mkldnn.fp32_precision", "mkldnn.matmul.fp32_precision"),
    *("mkldnn.conv.fp32_precision", "mkldnn.rnn.fp32_precision"),
)
_ATTENTION_KERNELS = ("flash", "mem_efficient", "math", "cudnn")
_Setting = tuple[Callable[[], Any], Callable[[Any], object]]


class Settings:
    """Snapshot of torch's settings, environment, working directory and ``sys.path``."""

    def __init__(self) -> None:
        self._values = [(read, write, _read(read)) for read, write in _settings()]

    def restore(self) -> None:
        for read, write, value in self._values:
            if value is not None and _read(read) != value:
                write(value)


def _settings() -> Iterator[_Setting]:
    yield lambda: dict(os.environ), _write_environment
    yield os.getcwd, os.chdir
    yield lambda: list(sys.path), functools.partial(sys.path.__setitem__, slice(None))
    yield torch.get_default_dtype, torch.set_default_dtype
    yield torch.get_num_threads, torch.set_num_threads
    yield torch.is_grad_enabled, torch.set_grad_enabled
    yield torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    yield torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode
    yield gc.isenabled, lambda is_on: gc.enable() if is_on else gc.disable()
    for name in _BACKEND_SETTINGS:
        *path, attribute = name.split(".")
        owner: Any = torch.backends
        for part in path:
            owner = getattr(owner, part, None)
        yield functools.partial(getattr, owner, attribute), functools.partial(setattr, owner, attribute)
    for name in _ATTENTION_KERNELS:
        cuda = torch.backends.cuda
        yield getattr(cuda, f"{name}_sdp_enabled"), getattr(cuda, f"enable_{name}_sdp")


def _read(read: Callable[[], Any]) -> Any:
    """Return a setting; None if this version of torch does not have it."""
    try:
        return read()
    except (AttributeError, RuntimeError):
        return None


def _write_environment(variables: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(variables)


class ProcessState:
    """Snapshot of a process before its first engine.

    Create the process group, and everything else that must survive ``restore``, before the snapshot. Python objects that are
    alive after the first ``restore`` are never collected.
    """

    def __init__(self) -> None:
        self._is_frozen = False
        self._groups = set(process_groups())
        self._namespaces = [
            (owner, {name: value for name, value in vars(owner).items() if callable(value)})
            for owner in _PATCHED
        ]
        self._settings = Settings()

    def restore(self, engines: list[Any]) -> None:
        """Destroy and clear ``engines``; undo all process changes except random states.

        The caller must keep no other reference to the engines or to their models.

        Ranks: all ranks of the engines. Destroying groups is collective with NCCL, but not with gloo.
        """
        while engines:
            _destroy(engines.pop())
        self._undo_patches()
        process.reset_globals()
        dynamo = sys.modules.get("torch._dynamo")
        if dynamo is not None and hasattr(dynamo, "reset"):
            dynamo.reset()  # compiled graphs refer to the modules that they were compiled for
        # Modules, parameters, hooks and engines form cycles through closures. Finalizers make new cycles, hence two passes.
        gc.collect()
        gc.collect()
        if not self._is_frozen:
            # The million objects of imported modules are never freed, and each scan of them would take seconds.
            gc.freeze()
            self._is_frozen = True
        if has_device():
            # NCCL's destroy_process_group frees memory that kernels of collectives still use (torch 2.13 ProcessGroupNCCL waits
            # only for collectives that were enqueued with a work object).
            get_accelerator().synchronize()
        process.release_groups()
        # Groups made after the snapshot are destroyed in the order of creation, which is the same on all ranks.
        for group in [group for group in process_groups() if group not in self._groups]:
            torch.distributed.destroy_process_group(group)
        self._settings.restore()
        _empty_caches()

    def _undo_patches(self) -> None:
        for owner, before in self._namespaces:
            now = vars(owner)
            for name, value in before.items():
                if now.get(name, value) is not value:
                    setattr(owner, name, value)
        for name, hooks in vars(nn.modules.module).items():
            if name.startswith("_global_") and isinstance(hooks, dict):
                hooks.clear()


def _destroy(engine: Any) -> None:
    # ``destroy`` removes hooks on gradients, and closes offload buffers and DeepNVMe handles.
    with contextlib.suppress(AttributeError):
        engine.destroy()
    if getattr(engine, "training_dataloader", None) is not None:
        engine.training_dataloader = None
    # Optimizer and module refer to each other and to the engine through closures of hooks. Python's collector does not see the
    # C++ side of an autograd hook, so the cycles are cut here.
    module = getattr(engine, "module", None)
    for parameter in module.parameters() if module is not None else ():
        parameter.grad = None
        for name in [name for name in vars(parameter) if name.startswith(process.PARAMETER_ATTRIBUTES)]:
            with contextlib.suppress(AttributeError):
                delattr(parameter, name)
    optimizer = getattr(engine, "optimizer", None)
    for owner in (optimizer, engine):
        for name in process.CONTAINERS:
            container = getattr(owner, "__dict__", {}).get(name)
            if isinstance(container, (dict, list, set)):
                container.clear()
    for owner in (optimizer, getattr(optimizer, "optimizer", None)):
        state: Any = getattr(owner, "__dict__", {}).get("state")
        if hasattr(state, "clear"):
            state.clear()


def _empty_caches() -> None:
    if has_device():
        get_accelerator().empty_cache()
        get_accelerator().reset_peak_memory_stats()
        empty_host_cache = getattr(torch._C, "_host_emptyCache", None)
        if empty_host_cache is not None:
            empty_host_cache()
    # glibc keeps freed memory in its arenas, and the next configuration's peak would include it.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


@dataclasses.dataclass(frozen=True, slots=True)
class ProcessUsage:
    """Counts and sizes of the resources that a process uses."""

    num_tensors: int  # tensors with storage that Python's garbage collector tracks
    tensor_bytes: int  # of their storages, each counted once
    num_groups: int
    num_threads: int
    num_files: int
    device_bytes: int  # 0 on the CPU
    resident_bytes: int  # RSS

    def grown_over(self, baseline: ProcessUsage) -> list[str]:
        """Return ``name before -> now`` of resources that grew by more than a tolerance."""
        slack = {
            "num_tensors": 64,
            "tensor_bytes": 2**20,
            "num_groups": 0,
            "num_threads": 2,
            # An NCCL communicator opens sockets and shared memory, and keeps some for the next one (its proxy, its bootstrap).
            "num_files": 64 if has_device() else 8,
            "device_bytes": 2**21,
            "resident_bytes": max(2**28, baseline.resident_bytes // 4),  # allocators keep some for later
        }
        grown = []
        for name, allowed in slack.items():
            now, before = getattr(self, name), getattr(baseline, name)
            if now > before + allowed:
                grown.append(f"{name} {before} -> {now}")
        return grown


def process_usage() -> ProcessUsage:
    """Return the resources that this process uses now."""
    storages: dict[int, int] = {}
    num_tensors = 0
    with warnings.catch_warnings():
        # The scan calls properties of deprecated objects.
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
        num_files=len(os.listdir("/proc/self/fd")),  # noqa: PTH208  # counts, the listing's own descriptor included
        device_bytes=int(get_accelerator().memory_allocated()) if has_device() else 0,
        resident_bytes=int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
    )


def reset_host_peak() -> None:
    """Reset the kernel's record of this process's peak memory (VmHWM), if permitted."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def process_groups() -> list[Any]:
    """Return the torch process groups of this process, in order of creation."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return []
    return list(torch.distributed.distributed_c10d._world.pg_map)


def has_device() -> bool:
    return str(get_accelerator().device_name()) != "cpu"
