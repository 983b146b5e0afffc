"""Measure a rank's memory: counters, and how the first batch uses the memory.

Uses of memory are parameters, gradients, optimizer state, activations and buffers. All but activations are sums over the storages
of the engines' tensors. If FLOPs are counted, activations and the peak are tracked operation by operation. Otherwise, activations
are the growth of the device's memory counter in the forward pass, and are unknown on the CPU.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from dstrial.engine.deepspeed_internals.engines import steps_next
from dstrial.engine.memory import ACTIVATIONS, ALL_PARTS, MemorySplit
from dstrial.engine.model_flops import FlopCounter

logger = logging.getLogger("dstrial.telemetry")

ResultT = TypeVar("ResultT")

PEAK = "tensors_peak_bytes"  # maximum of all live tensors on the device, tracked operation by operation
HOST = "host_tensors_bytes"  # engine state that is offloaded to the host

# How the memory was measured, for users of the telemetry.
BY_OPERATIONS = "storages of tensors; activations and peak operation by operation"
BY_COUNTERS = "storages of tensors; activations by the device's counter"
BY_STORAGES = "storages of tensors; activations unknown"


def memory_now(accelerator: Any) -> dict[str, int]:
    """Return the memory counters of this process and its device: name -> bytes.

    Does not synchronise the device. On the CPU, there are only counters of the process.
    """
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    counters = {"process_memory_bytes": "VmRSS", "process_peak_memory_bytes": "VmHWM"}
    found = {name: int(status[key].split()[0]) * 1024 for name, key in counters.items()}
    if accelerator.device_name() == "cpu":
        return found
    for name, read in (
        ("device_memory_bytes", "memory_allocated"),
        ("device_peak_memory_bytes", "max_memory_allocated"),
        ("device_reserved_memory_bytes", "max_memory_reserved"),
    ):
        try:
            found[name] = int(getattr(accelerator, read)())
        except (AttributeError, NotImplementedError, RuntimeError, TypeError):
            continue  # the accelerator has no such counter
    return found


class FirstBatchMemory:
    """Measures memory by use (parameters, gradients, ...) in a rank's first batch.

    Methods never raise. Attribute ``found_by`` is ``BY_OPERATIONS``, ``BY_COUNTERS`` or ``BY_STORAGES``; None before the
    first step and after an error.
    """

    def __init__(self, engines: Sequence[Any], accelerator: Any) -> None:
        self._engines = engines
        self._accelerator = accelerator
        self._has_counters = accelerator.device_name() != "cpu"
        self._split: MemorySplit | None = None
        self._at_start_bytes: int | None = None
        self._found: dict[str, int] = {}
        self._how: str | None = None
        self.found_by: str | None = None

    def begin(self, counter: FlopCounter | None) -> None:
        """Start measuring, before the first batch.

        ``counter`` tracks activations by operation; None if FLOPs cannot be counted.
        """
        with self._safely():
            self._split = MemorySplit(self._engines, self._is_host)
            if counter is None:
                self._how = BY_COUNTERS if self._has_counters else BY_STORAGES
                self._at_start_bytes = self._allocated()
            else:
                self._how = BY_OPERATIONS
                counter.on_result = self._operation

    def entering(self, phase: str) -> None:
        if phase == "backward" and self._at_start_bytes is not None:
            with self._safely():
                left = (self._allocated() or 0) - self._at_start_bytes
                self._at_start_bytes = None  # measure only once: later, the counter includes gradients
                self._found[f"{ACTIVATIONS}_bytes"] = max(0, left)

    def around_step(self, call: Callable[[], ResultT]) -> ResultT:
        """Run an engine's step, ``call``, and return its result; measure memory around it.

        Steps that only accumulate gradients are not measured.
        """
        split = self._split
        if split is None or not any(steps_next(engine) for engine in self._engines):
            return call()
        with self._safely():
            split.begin_step()
        result = call()
        with self._safely():
            split.end_step()
            self._take(split)
        return result

    def end(self) -> None:
        if self._split is not None:
            self._split.close()
        self._split = None

    def bytes(self) -> dict[str, int]:
        """Return ``<use>_bytes`` -> maximum number of bytes.

        Return {} before the first step and after an error.
        """
        return dict(self._found) if self.found_by is not None else {}

    def _operation(self, result: Any, args: Any) -> None:
        if self._split is None:
            return
        try:
            self._split.operation(result, args)
        except Exception as error:  # noqa: BLE001  # instruments never end a training
            self._give_up(error)

    def _take(self, split: MemorySplit) -> None:
        self._found |= {f"{part}_bytes": split.device[part] for part in ALL_PARTS if part in split.device}
        if self._how == BY_OPERATIONS:
            self._found[PEAK] = split.peak_bytes
        if on_host := sum(split.host.values()):
            self._found[HOST] = on_host
        self.found_by = self._how

    def _is_host(self, device: torch.device) -> bool:
        return self._has_counters and device.type == "cpu"

    def _allocated(self) -> int | None:
        return int(self._accelerator.memory_allocated()) if self._has_counters else None

    @contextlib.contextmanager
    def _safely(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001  # likewise
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        logger.info("the use of memory is not measured: %s: %s", type(error).__name__, error)
        self._split = self.found_by = self._at_start_bytes = None
