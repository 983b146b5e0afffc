"""Measure a device's peak FLOP/s in matrix products; cache the result.

The peak is measured after training, and again after a run that has exceeded the cached peak. To measure anew, delete
``matmul_peaks.json`` in the user's cache directory for dstrial.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import platformdirs
import torch

from dstrial.errors import DstrialError
from dstrial.local.json_files import read_json, write_json_atomically
from dstrial.telemetry.samples import Peak

_ROUNDS = 5
_CPU_SIZE = 1024
_DEVICE_SIZE = 8192
_ROUND_S = 0.03
_MAX_S = 1.0

DATA_SHEETS: tuple[tuple[str, dict[str, float]], ...] = (
    ("H200", {"bfloat16": 989.4, "float16": 989.4, "float32": 66.9}),
    ("H100 PCIe", {"bfloat16": 756.0, "float16": 756.0, "float32": 51.0}),
    ("H100 NVL", {"bfloat16": 835.5, "float16": 835.5, "float32": 60.0}),
    ("H100", {"bfloat16": 989.4, "float16": 989.4, "float32": 66.9}),
    ("A100", {"bfloat16": 312.0, "float16": 312.0, "float32": 19.5}),
    ("L40S", {"bfloat16": 362.05, "float16": 362.05, "float32": 91.6}),
    ("L4", {"bfloat16": 121.0, "float16": 121.0, "float32": 30.3}),
    ("A10", {"bfloat16": 125.0, "float16": 125.0, "float32": 31.2}),
    ("T4", {"float16": 65.0, "float32": 8.1}),
    ("V100", {"float16": 125.0, "float32": 15.7}),
    ("MI300X", {"bfloat16": 1307.4, "float16": 1307.4, "float32": 163.4}),
)
"""Pairs (words of a device's name, type -> TFLOPS for dense matrices without TF32); the first pair that matches is used.

Source: NVIDIA's data sheets of H100 and H200 (half of the figures "with sparsity"), A100, L40S, L4, A10, T4, V100 (SXM2), and
AMD's of MI300X.
"""


def data_sheet(device: str, dtype: str) -> float | None:
    """Return the manufacturer's peak FLOP/s; None if not in ``DATA_SHEETS``."""
    words = device.replace("-", " ").split()
    for name, figures in DATA_SHEETS:
        if all(word in words for word in name.split()):
            figure = figures.get(dtype)
            return None if figure is None else figure * 1e12
    return None


def cache_path() -> Path:
    return Path(platformdirs.user_cache_dir("dstrial")) / "matmul_peaks.json"


def device_name(device: torch.device) -> str:
    if device.type != "cpu":
        module: Any = getattr(torch, device.type, None)
        get = getattr(module, "get_device_name", None)
        return str(get(device)) if get is not None else device.type
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return "cpu"
    names = (line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name"))
    return next(names, "cpu")


def known_peak(device: torch.device, dtype: torch.dtype) -> Peak | None:
    """Return this device's cached peak FLOP/s for a type; None if not measured yet."""
    try:
        kept = read_json(cache_path()) or {}
        found = kept.get(_key(device, dtype))
        return None if found is None else Peak(**found)
    except (DstrialError, OSError, TypeError, AttributeError):
        return None  # the file is damaged or written by another release


def measured_peak(device: torch.device, dtype: torch.dtype) -> Peak:
    """Measure a device's peak FLOP/s for about a second; cache and return it.

    If the cached peak is larger, it is returned instead. Synchronises the device; torch's random states do not change.

    Raises:
        RuntimeError: the device does not support the type, or lacks memory for the matrices.
    """
    size = _CPU_SIZE if device.type == "cpu" else _DEVICE_SIZE
    name = device_name(device)
    dtype_name = str(dtype).removeprefix("torch.")
    rate = _rate(device, dtype, size)
    threads = torch.get_num_threads() if device.type == "cpu" else 0
    peak = Peak(rate, name, dtype_name, size, threads, data_sheet(name, dtype_name))
    before = known_peak(device, dtype)
    if before is not None and before.flops_per_s > rate:
        return before
    _keep(_key(device, dtype), peak)
    return peak


def _key(device: torch.device, dtype: torch.dtype) -> str:
    parts = [device_name(device), str(dtype).removeprefix("torch."), f"torch {torch.__version__}"]
    parts.append(f"{torch.get_num_threads()} threads" if device.type == "cpu" else "")
    if dtype is torch.float32:
        parts.append(torch.get_float32_matmul_precision())
    return ", ".join(part for part in parts if part)


def _keep(key: str, peak: Peak) -> None:
    path = cache_path()
    kept: Any = None
    with contextlib.suppress(DstrialError):
        kept = read_json(path)
    kept = kept if isinstance(kept, dict) else {}
    fields = {name: getattr(peak, name) for name in Peak.__dataclass_fields__}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json_atomically(path, json.loads(json.dumps({**kept, key: fields})), sync=False)


def _rate(device: torch.device, dtype: torch.dtype, size: int) -> float:
    generator = torch.Generator().manual_seed(
        0
    )  # a separate generator leaves the trial's random state unchanged
    left, right = (torch.randn(size, size, generator=generator).to(device, dtype) for _ in range(2))

    def wait() -> None:
        if device.type != "cpu":
            torch.accelerator.synchronize()

    def seconds(call: Callable[[], object], times: int) -> float:
        wait()
        began_s = time.perf_counter()
        for _ in range(times):
            call()
        wait()
        return max((time.perf_counter() - began_s) / times, 1e-9)

    with torch.no_grad():
        seconds(lambda: left @ right, 1)  # warm-up: loads kernels
        best = seconds(lambda: left @ right, 1)
        times = max(1, round(_ROUND_S / best))
        give_up_at_s = time.perf_counter() + _MAX_S
        for _ in range(_ROUNDS):
            best = min(best, seconds(lambda: left @ right, times))
            if time.perf_counter() > give_up_at_s:
                break
    return 2.0 * size**3 / best
