"""Ask NVIDIA's driver (NVML) and the kernel for accelerators and their users."""

from __future__ import annotations

import contextlib
import dataclasses
import pwd
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from dstrial.doctor.devices import Device, DeviceUser, Hardware

T = TypeVar("T")
_KERNEL_MODULE = Path("/proc/driver/nvidia/version")
_KFD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")
_COMPUTE_MODES = {0: "default", 1: "exclusive thread", 2: "prohibited", 3: "exclusive process"}


def measure() -> Hardware:
    """Ask the drivers."""
    hardware = _nvidia()
    return dataclasses.replace(hardware, num_amd=_num_amd())


def _nvidia() -> Hardware:
    module = _kernel_module_version()
    try:
        import pynvml
    except ImportError:
        return Hardware(driver=module, error="" if module is None else "the package nvidia-ml-py is missing")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        is_there = module is not None or Path("/dev/nvidiactl").exists()
        return Hardware(driver=module, error=str(error) if is_there else "")
    try:
        return _ask(pynvml, module)
    except pynvml.NVMLError as error:
        return Hardware(driver=module, error=str(error))
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _ask(nvml: Any, module: str | None) -> Hardware:
    def offered(call: Callable[[], T]) -> T | None:
        """What a call returns; None where this driver or this device does not offer it."""
        try:
            return call()
        except nvml.NVMLError:
            return None

    number = offered(nvml.nvmlSystemGetCudaDriverVersion_v2)
    devices = []
    for idx in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(idx)
        devices.append(_device(nvml, idx, handle, offered))
    return Hardware(
        driver=_text(offered(nvml.nvmlSystemGetDriverVersion) or module or ""),
        driver_cuda=None if number is None else (number // 1000, number % 1000 // 10),
        devices=tuple(devices),
    )


def _device(nvml: Any, idx: int, handle: Any, offered: Callable[[Callable[[], Any]], Any]) -> Device:
    memory = offered(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
    mig = offered(lambda: nvml.nvmlDeviceGetMigMode(handle))
    is_mig = mig is not None and mig[0] == nvml.NVML_DEVICE_MIG_ENABLE
    instances = []
    for instance_idx in (
        range(offered(lambda: nvml.nvmlDeviceGetMaxMigDeviceCount(handle)) or 0) if is_mig else ()
    ):
        instance = offered(lambda i=instance_idx: nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, i))  # type: ignore[misc]
        if instance is not None:
            instances.append(instance)
    processes = [
        process
        for one in (instances or [handle])
        for process in offered(lambda one=one: nvml.nvmlDeviceGetComputeRunningProcesses(one)) or ()  # type: ignore[misc]
    ]
    capability = offered(lambda: nvml.nvmlDeviceGetCudaComputeCapability(handle))
    remapped = offered(lambda: nvml.nvmlDeviceGetRemappedRows(handle))
    return Device(
        idx=idx,
        name=_text(offered(lambda: nvml.nvmlDeviceGetName(handle)) or "NVIDIA device"),
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        total_bytes=0 if memory is None else int(memory.total),
        used_bytes=0 if memory is None else int(memory.used),
        capability=None if capability is None else (int(capability[0]), int(capability[1])),
        users=tuple(_user(int(process.pid), process.usedGpuMemory) for process in processes),
        is_mig=is_mig,
        mig_uuids=tuple(_text(nvml.nvmlDeviceGetUUID(instance)) for instance in instances),
        compute_mode=_COMPUTE_MODES.get(
            offered(lambda: nvml.nvmlDeviceGetComputeMode(handle)) or 0, "default"
        ),
        num_memory_errors=offered(
            lambda: nvml.nvmlDeviceGetTotalEccErrors(
                handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            )
        ),
        needs_reset=remapped is not None and bool(remapped[2] or remapped[3]),
    )


def _user(pid: int, num_bytes: int | None) -> DeviceUser:
    process = Path(f"/proc/{pid}")
    name = account = ""
    # The arguments are left out: they may hold what is secret.
    with contextlib.suppress(OSError):
        name = (process / "comm").read_text(encoding="utf-8", errors="replace").strip()
        owner = process.stat().st_uid
        try:
            account = pwd.getpwuid(owner).pw_name
        except KeyError:
            account = f"user id {owner}"
    return DeviceUser(pid, name, account, None if num_bytes is None else int(num_bytes))


def _kernel_module_version() -> str | None:
    with contextlib.suppress(OSError):
        found = re.search(
            r"\b\d+\.\d+(?:\.\d+)?\b", _KERNEL_MODULE.read_text(encoding="utf-8", errors="replace")
        )
        return None if found is None else found.group()
    return None


def _num_amd() -> int:
    count = 0
    for properties in _KFD_NODES.glob("*/properties"):
        with contextlib.suppress(OSError, ValueError):
            lines = properties.read_text(encoding="utf-8").splitlines()
            facts = dict(line.split(maxsplit=1) for line in lines if " " in line)
            count += int(facts.get("simd_count", "0")) > 0
    return count


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
