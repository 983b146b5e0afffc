"""Versions, driver and devices; torch and NVML agree on devices; bf16 multiplies.

They name the same devices in the same order. On the CPU there are none to compare; versions, compilers and bf16 are shown.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from typing import Any

from dstrial.doctor.training.bench import Bench
from dstrial.doctor.training.check import CheckFailedError, Finding

_PACKAGES = ("dstrial", "torch", "deepspeed", "determined", "numpy", "triton", "nvidia-ml-py")
_COMPILERS = ("g++", "nvcc", "ninja")
_UUIDS_MIG = "MIG-"


def run(bench: Bench) -> Finding:
    """Note everything, then compare."""
    bench.note(
        python=platform.python_version(),
        system=platform.platform(),
        **{package: _version(package) for package in _PACKAGES},
        **{compiler: _compiler(compiler) for compiler in _COMPILERS},
        cores=len(os.sched_getaffinity(0)),
        memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
    )
    import torch

    bench.note(torch_cuda=str(torch.version.cuda), accelerator="cpu" if bench.is_cpu else _accelerator())
    _multiply(bench)
    if not bench.has_cuda:
        return Finding(
            f"torch {torch.__version__} on {'CPU' if bench.is_cpu else _accelerator()}; bf16 multiplies",
            "driver, NVML and the order of devices: there is no CUDA device here",
        )
    return _with_cuda(bench)


def _accelerator() -> str:
    import torch

    found = torch.accelerator.current_accelerator()
    return "unknown to torch" if found is None else str(found.type)


def _multiply(bench: Bench) -> None:
    import torch

    device = torch.device("cpu") if bench.is_cpu else torch.device(_accelerator(), 0)
    for dtype in (torch.float32, torch.bfloat16):
        ones = torch.ones(64, 64, device=device, dtype=dtype)
        found = float((ones @ ones).float().sum())
        if found != 64.0**3:
            raise CheckFailedError(
                f"the sum of a product of ones in {dtype} is {found}; expected {64.0**3}",
                "Look for a torch build that fits this device.",
            )


def _with_cuda(bench: Bench) -> Finding:
    import torch

    # Of processes that may see other devices than this one: CUDA_VISIBLE_DEVICES may leave some out.
    in_torch = [torch.cuda.get_device_properties(idx) for idx in range(torch.cuda.device_count())]
    cudnn: Any = torch.backends.cudnn
    nccl: Any = torch.cuda.nccl
    has_nccl = torch.distributed.is_nccl_available()
    bench.note(
        devices=[
            {
                "name": one.name,
                "memory_gib": round(one.total_memory / 2**30, 1),
                "uuid": str(getattr(one, "uuid", "")),
            }
            for one in in_torch
        ],
        cudnn=str(cudnn.version()),
        nccl=".".join(map(str, nccl.version())) if has_nccl else "missing",
    )
    try:
        nvml = _nvml()
    except Exception as error:  # whatever keeps NVML from answering is the finding
        raise CheckFailedError(
            f"NVML does not answer ({type(error).__name__}: {error})",
            "Install nvidia-ml-py, and in a container show it the driver's libraries (libnvidia-ml.so.1).",
        ) from error
    bench.note(driver=nvml["driver"], driver_cuda=nvml["cuda"], nvml_devices=nvml["uuids"])
    ours = [str(getattr(one, "uuid", "")).removeprefix("GPU-") for one in in_torch]
    theirs = [uuid.removeprefix("GPU-") for uuid in nvml["uuids"]]
    if any(ours) and not any(uuid.startswith(_UUIDS_MIG) for uuid in ours):
        order = [theirs.index(uuid) for uuid in ours if uuid in theirs]
        if len(order) < len(ours):
            raise CheckFailedError(
                f"torch names devices {ours} and NVML {theirs}",
                "Reboot, or reload the driver: they do not belong together.",
            )
        if order != sorted(order):
            raise CheckFailedError(
                f"torch counts NVML's devices as {order}",
                "Set CUDA_DEVICE_ORDER=PCI_BUS_ID, so that indices mean the same device everywhere.",
            )
    if not torch.cuda.is_bf16_supported():
        return Finding(
            f"{in_torch[0].name}, driver {nvml['driver']}, without bf16", "bf16, which this device lacks"
        )
    return Finding(
        f"{len(in_torch)} x {in_torch[0].name}, driver {nvml['driver']} (CUDA {nvml['cuda']}), torch {torch.__version__}; "
        "torch and NVML agree, bf16 multiplies"
    )


def _nvml() -> dict[str, Any]:
    import pynvml

    pynvml.nvmlInit()
    try:
        version = int(pynvml.nvmlSystemGetCudaDriverVersion())
        handles = [pynvml.nvmlDeviceGetHandleByIndex(idx) for idx in range(pynvml.nvmlDeviceGetCount())]
        return {
            "driver": _text(pynvml.nvmlSystemGetDriverVersion()),
            "cuda": f"{version // 1000}.{version % 1000 // 10}",
            "uuids": [_text(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles],
        }
    finally:
        pynvml.nvmlShutdown()


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def _compiler(name: str) -> str:
    path = shutil.which(name)
    if path is None and name == "nvcc" and os.path.exists("/usr/local/cuda/bin/nvcc"):  # noqa: PTH110
        path = "/usr/local/cuda/bin/nvcc"
    if path is None:
        return "missing"
    try:
        told = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=10, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{path} ({error})"
    lines = [line for line in told.splitlines() if line.strip()]
    return next((line for line in lines if "release" in line), lines[0] if lines else path)
