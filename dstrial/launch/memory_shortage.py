"""Explain out-of-memory errors: memory in use, and settings to change."""

from __future__ import annotations

import contextlib
import errno
import gc
import resource
import sys
from pathlib import Path
from typing import Any

from dstrial.engine.host_memory import available_bytes
from dstrial.visible_text import size_text

# Parts of messages of out-of-memory errors, in lower case.
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
    """Return memory use and hints for an out-of-memory error; "" for other errors.

    Call it while the exception propagates, before memory is freed. Ranks: any; no communication.
    """
    if not is_memory_shortage(error):
        return ""
    held = size_text(1024 * (_number(Path("/proc/self/status"), "VmRSS:") or 0))
    left = available_bytes()
    texts = [f"This rank held {held} of host memory{_capacity()}"]
    texts[0] += "." if left is None else f", {size_text(left)} left."
    engine: Any = None
    with contextlib.suppress(Exception):  # measuring may run out of memory, too
        engine = _engine()
        cuda = getattr(sys.modules.get("torch"), "cuda", None)
        if cuda is not None and cuda.is_initialized():
            free, capacity = cuda.mem_get_info()
            texts.append(
                f"This rank held {size_text(cuda.memory_reserved())} of memory of cuda:{cuda.current_device()}; there are "
                f"{size_text(capacity)}, {size_text(free)} left."
            )
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
    """Return the probable cause of a rank's SIGKILL, as text for the user.

    ``oom_kills_before`` is the value of :func:`oom_kills` when the rank was started.
    """
    now = oom_kills()
    largest = size_text(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)
    if now is not None and oom_kills_before is not None and now > oom_kills_before:
        return (
            "It left no traceback: memory ran out, and the kernel killed it (see dmesg). "
            f"The largest rank held {largest}{_capacity()}.\n{_fixes_text(None, is_of_device=False)}"
        )
    return (
        "It left no traceback. Another process killed it, or the kernel did as memory ran out in a control group: see dmesg. "
        f"The largest rank held {largest}{_capacity()}."
    )


def _capacity() -> str:
    total = _number(_MEMINFO, "MemTotal:")
    return "" if total is None else f"; this machine has {size_text(total * 1024)}"


def _engine() -> Any:
    engine_class = getattr(sys.modules.get("deepspeed"), "DeepSpeedEngine", None)
    if engine_class is None:
        return None
    return next((one for one in gc.get_objects() if issubclass(type(one), engine_class)), None)


def _number(path: Path, name: str) -> int | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in path.read_text(errors="replace").splitlines():
            if line.split()[:1] == [name]:
                return int(line.split()[1])
    return None
