"""Measure the speed of the machine with all ranks busy, to predict step times."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed
from deepspeed.accelerator import get_accelerator

from dstrial.dsat.predictor.hardware import METRIC_PREFIX

_SIZES = (256, 512, 1024, 2048, 4096, 8192)  # rows of the square matrices that are multiplied
_LONG_ENOUGH_S = 0.02  # products that take longer reach no higher rate, so no larger ones are tried
_NUM_OPERATIONS = 300  # operations on a tiny tensor, of which the mean time is taken
_COPIED_BYTES = {"cpu": 2**24, "device": 2**28}  # size of the copies that measure bandwidth of memory
_SENT_BYTES = {"cpu": 2**22, "device": 2**27}  # size of the collectives that measure bandwidth
_FEW_BYTES = 4096  # size of the collectives that measure latency
_REPEATS = 5  # a time is the median of this many measurements


def measure_machine(dtype: torch.dtype) -> dict[str, float]:
    """Return the metrics that ``Machine.from_metrics`` reads; takes about two seconds.

    Ranks: all, collectively; each rank returns the rates that it measured.
    """
    accelerator = get_accelerator()
    is_cpu = accelerator.device_name() == "cpu"
    kind = "cpu" if is_cpu else "device"
    device = torch.device(accelerator.current_device_name())

    def timed(call: Callable[[], object], times: int = 1) -> float:
        """Return the seconds of one call: the median of 5 means over ``times`` calls."""
        found = []
        for _ in range(_REPEATS):
            if not is_cpu:
                accelerator.synchronize()
            began_s = time.perf_counter()
            for _ in range(times):
                call()
            if not is_cpu:
                accelerator.synchronize()
            found.append((time.perf_counter() - began_s) / times)
        return max(statistics.median(found), 1e-9)

    with torch.no_grad():
        _barrier(device)
        found = {"flops_per_s": _matmul_rate(timed, device, dtype)}
        one = torch.zeros(8, device=device)
        found["operation_s"] = timed(lambda: one.add_(1.0), _NUM_OPERATIONS)
        _barrier(device)
        found["copy_bytes_per_s"] = _copy_rate(timed, device, _COPIED_BYTES[kind])
        if not is_cpu:
            found["host_bytes_per_s"] = _copy_rate(timed, torch.device("cpu"), _COPIED_BYTES["cpu"])
            on_host = torch.zeros(_COPIED_BYTES["cpu"], dtype=torch.uint8).pin_memory()
            on_device = torch.zeros_like(on_host, device=device)
            seconds = timed(lambda: on_device.copy_(on_host, non_blocking=True))
            found["host_copy_bytes_per_s"] = on_host.numel() / seconds
        found |= _collective_rates(timed, device, _SENT_BYTES[kind])
    return {METRIC_PREFIX + name: value for name, value in found.items()}


def _matmul_rate(timed: Callable[..., float], device: torch.device, dtype: torch.dtype) -> float:
    best = 0.0
    for size in _SIZES:
        left = torch.ones(size, size, device=device, dtype=dtype)
        right = torch.ones(size, size, device=device, dtype=dtype)
        torch.matmul(left, right)
        seconds = timed(lambda left=left, right=right: torch.matmul(left, right))
        best = max(best, 2 * size**3 / seconds)
        if seconds > _LONG_ENOUGH_S:
            break
    return best


def _copy_rate(timed: Callable[..., float], device: torch.device, num_bytes: int) -> float:
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * num_bytes / timed(lambda: target.copy_(source))


def _collective_rates(timed: Callable[..., float], device: torch.device, num_bytes: int) -> dict[str, float]:
    """Return ``KIND_latency_s`` and ``KIND_bytes_per_s`` of each collective of ZeRO.

    KIND is ``all_reduce``, ``all_gather`` or ``reduce_scatter``, if the backend has it. Empty on a single rank. ``timed(call,
    n)`` returns the seconds of one call, repeated n times. ``num_bytes`` is the size of the tensor of all ranks together.

    Ranks: all, collectively.
    """
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return {}
    size = torch.distributed.get_world_size()
    found: dict[str, float] = {}

    def call_of(kind: str, whole_bytes: int) -> Callable[[], object]:
        shard = torch.zeros(max(whole_bytes // 4 // size, 1), device=device)
        whole = torch.zeros(shard.numel() * size, device=device)
        if kind == "all_reduce":
            return lambda: torch.distributed.all_reduce(whole)
        if kind == "all_gather":
            return lambda: torch.distributed.all_gather_into_tensor(whole, shard)
        return lambda: torch.distributed.reduce_scatter_tensor(shard, whole)

    for kind in ("all_reduce", "all_gather", "reduce_scatter"):
        few, many = call_of(kind, _FEW_BYTES), call_of(kind, num_bytes)
        try:
            many()
        except (RuntimeError, NotImplementedError):
            # The backend lacks this collective, as some versions of gloo lack reduce_scatter. Nothing was sent.
            continue
        _barrier(device)
        latency_s = timed(few, 4)
        _barrier(device)
        found[f"{kind}_latency_s"] = latency_s
        found[f"{kind}_bytes_per_s"] = num_bytes / max(timed(many) - latency_s, 1e-6)
    return found


def _barrier(device: torch.device) -> None:
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        torch.distributed.all_reduce(torch.zeros(1, device=device))
