"""Explain out-of-memory errors: memory by kind of tensor, and settings to change."""

from __future__ import annotations

import contextlib
import errno
import gc
import resource
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dstrial.engine.host_memory import available_bytes
from dstrial.visible_text import size_text

_PHRASES = (
    "can't allocate memory",  # torch 2.13 c10/core/impl/alloc_cpu.cpp
    "cannot allocate memory",
    "out of memory",  # CUDA, HIP, and torch for an accelerator
    "unable to mmap",
)
_MEMINFO = Path("/proc/meminfo")
_VMSTAT = Path("/proc/vmstat")


def is_memory_shortage(error: BaseException) -> bool:
    """Return whether an exception or one of its causes is an out-of-memory error."""
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        if isinstance(one, MemoryError) or (isinstance(one, OSError) and one.errno == errno.ENOMEM):
            return True
        if isinstance(one, RuntimeError) and any(phrase in str(one).lower() for phrase in _PHRASES):
            return True
        one = one.__cause__ or one.__context__
    return False


def memory_advice(error: BaseException) -> str:
    """Return a text on memory use, with hints; empty if memory was not the problem.

    Call it while the exception propagates, before memory is freed. Ranks: any; no communication.
    """
    if not is_memory_shortage(error):
        return ""
    torch = sys.modules.get("torch")
    tensors: dict[str, dict[str, int]] = {}
    engine: Any = None
    if torch is not None:
        # Measuring may run out of memory too; earlier results are still reported.
        with contextlib.suppress(Exception):
            engine = _engine()
            tensors = _tensors(torch)
    texts = [_on_host(tensors.get("cpu", {}))]
    if torch is not None and torch.cuda.is_initialized():
        with contextlib.suppress(Exception):
            texts.append(_on_device(torch, tensors))
    return "\n".join([*texts, _fixes_text(engine, is_of_device=len(texts) > 1)])


def _fixes_text(engine: Any, *, is_of_device: bool) -> str:
    micro_batch = stage = None
    with contextlib.suppress(Exception):
        micro_batch, stage = engine.train_micro_batch_size_per_gpu(), engine.zero_optimization_stage()
    now = "" if micro_batch is None else f" ({micro_batch} now)"
    changes = [
        f"lower train_micro_batch_size_per_gpu{now} and raise gradient_accumulation_steps by as much, which trains the same batch"
    ]
    if stage is None or stage < 3:
        now = "" if stage is None else f" ({stage} now)"
        changes.append(f"raise zero_optimization.stage{now} where there are several slots")
    if is_of_device:
        changes.append("checkpoint activations, or set zero_optimization.offload_optimizer: {device: cpu}")
    else:
        changes.append("lower num_workers of the data loaders, or keep fewer records in memory at a time")
    return f"To need less: {'; '.join(changes)}."


def oom_kills() -> int | None:
    """Return how many processes the OOM killer has ended since boot; None if unknown."""
    return _number(_VMSTAT, "oom_kill")


def killed_text(oom_kills_before: int | None) -> str:
    """Return the probable cause of a rank's SIGKILL, as text.

    ``oom_kills_before`` is the value of :func:`oom_kills` when the rank was started.
    """
    now = oom_kills()
    largest = size_text(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)
    total = _number(_MEMINFO, "MemTotal:")
    capacity = "" if total is None else f"; this machine has {size_text(total * 1024)}"
    if now is not None and oom_kills_before is not None and now > oom_kills_before:
        return (
            "It left no traceback: memory ran out, and the kernel killed it (see dmesg). "
            f"The largest rank held {largest}{capacity}.\n{_fixes_text(None, is_of_device=False)}"
        )
    return (
        "It left no traceback. Another process killed it, or the kernel did as memory ran out in a control group: see dmesg. "
        f"The largest rank held {largest}{capacity}."
    )


def _on_host(parts: Mapping[str, int]) -> str:
    resident = 0
    with contextlib.suppress(OSError, ValueError, IndexError):
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        resident = pages * resource.getpagesize()
    total = _number(_MEMINFO, "MemTotal:")
    capacity = None if total is None else total * 1024
    return _memory_text("host memory", resident, parts, resident, capacity, available_bytes())


def _on_device(torch: Any, tensors: Mapping[str, Mapping[str, int]]) -> str:
    device = torch.cuda.current_device()
    free, capacity = torch.cuda.mem_get_info(device)
    name = f"cuda:{device}"
    reserved, allocated = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    return _memory_text(f"memory of {name}", reserved, tensors.get(name, {}), allocated, capacity, free)


def _memory_text(
    name: str, held: int, parts: Mapping[str, int], used: int, capacity: int | None, free: int | None
) -> str:
    """Return a sentence on the memory of this process; all sizes are in bytes."""
    rest = {"everything else": used - sum(parts.values())}
    texts = [f"{size_text(size)} {role}" for role, size in {**parts, **rest}.items() if size > 0]
    described = f" ({', '.join(texts)})" if texts else ""
    left = "" if free is None else f", {size_text(free)} left"
    there = "" if capacity is None else f"; there are {size_text(capacity)}{left}"
    return f"This rank held {size_text(held)} of {name}{described}{there}."


def _tensors(torch: Any) -> dict[str, dict[str, int]]:
    """Return bytes of live tensors by device and role; each storage counts once."""
    found = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
    optimizers = [one for one in gc.get_objects() if issubclass(type(one), torch.optim.Optimizer)]
    parameters = [one for one in found if issubclass(type(one), torch.nn.Parameter)]
    groups: list[tuple[str, Iterable[Any]]] = [
        ("parameters", parameters),
        ("gradients", [one.grad for one in parameters if one.grad is not None]),
        ("optimizer state", [value for one in optimizers for value in _states(one, torch)]),
        ("other tensors", found),
    ]
    seen: set[tuple[str, int]] = set()
    sizes: dict[str, dict[str, int]] = {}
    for name, members in groups:
        for one in members:
            with contextlib.suppress(RuntimeError, NotImplementedError):
                storage = one.untyped_storage()
                key = (str(one.device), storage.data_ptr())
                if key not in seen:
                    seen.add(key)
                    of_device = sizes.setdefault(key[0], {})
                    of_device[name] = of_device.get(name, 0) + storage.nbytes()
    return sizes


def _states(optimizer: Any, torch: Any) -> list[Any]:
    return [
        value
        for state in optimizer.state.values()
        if isinstance(state, Mapping)
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]


def _engine() -> Any:
    engine_class = getattr(sys.modules.get("deepspeed"), "DeepSpeedEngine", None)
    if engine_class is None:
        return None
    return next((one for one in gc.get_objects() if issubclass(type(one), engine_class)), None)


def _number(path: Path, name: str) -> int | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in path.read_text(encoding="ascii").splitlines():
            if line.split()[:1] == [name]:
                return int(line.split()[1])
    return None
