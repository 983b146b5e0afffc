"""Check this machine's accelerators: driver, free memory and visible devices."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from dstrial.doctor.finding import Finding, note, ok, problem
from dstrial.master.backends.devices import Slot, find_slots
from dstrial.visible_text import plural, size_text

T = TypeVar("T")

# At least one exists where NVIDIA's driver is loaded.
_DRIVER_FILES = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl"))
_FULL_SHARE = 0.1  # if a smaller fraction of a device's memory is free, that is a problem
_USED_BYTES = 1 << 30  # used memory beyond this belongs to processes; the driver uses less


@dataclasses.dataclass(frozen=True, slots=True)
class Device:
    """One NVIDIA device, as its driver describes it."""

    idx: int  # driver's index, as with CUDA_DEVICE_ORDER=PCI_BUS_ID
    name: str
    total_bytes: int
    used_bytes: int
    capability: tuple[int, int] | None = None  # None if unknown


@dataclasses.dataclass(frozen=True, slots=True)
class Hardware:
    """The accelerators of this machine."""

    driver: str | None = None  # release of NVIDIA's driver, "there" if unknown; None without one
    driver_cuda: tuple[int, int] | None = None  # newest CUDA release that the driver supports
    error: str = ""  # why NVML failed although there is a driver
    devices: tuple[Device, ...] = ()  # NVIDIA's, also hidden ones
    visible: tuple[Slot, ...] = ()  # accelerators that a master would offer, also AMD's and MIG instances


def measure() -> Hardware:
    """Return all NVIDIA devices, and the accelerators that a master would offer."""
    visible = tuple(slot for slot in find_slots() if slot.kind != "cpu")
    driver = "there" if any(path.exists() for path in _DRIVER_FILES) else None
    try:
        import pynvml
    except ImportError:
        error = "" if driver is None else "the package nvidia-ml-py is missing"
        return Hardware(driver, error=error, visible=visible)
    try:
        pynvml.nvmlInit()
        return dataclasses.replace(_query(pynvml), visible=visible)
    except pynvml.NVMLError as error:
        return Hardware(driver, error="" if driver is None else str(error), visible=visible)
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _query(nvml: Any) -> Hardware:
    def offered(call: Callable[..., T], *arguments: Any) -> T | None:
        try:
            return call(*arguments)
        except nvml.NVMLError:
            return None

    devices = []
    for idx in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(idx)
        memory = offered(nvml.nvmlDeviceGetMemoryInfo, handle)
        capability = offered(nvml.nvmlDeviceGetCudaComputeCapability, handle)
        devices.append(
            Device(
                idx,
                _text(offered(nvml.nvmlDeviceGetName, handle) or "NVIDIA device"),
                0 if memory is None else int(memory.total),
                0 if memory is None else int(memory.used),
                None if capability is None else (int(capability[0]), int(capability[1])),
            )
        )
    number = offered(nvml.nvmlSystemGetCudaDriverVersion_v2)
    return Hardware(
        driver=_text(offered(nvml.nvmlSystemGetDriverVersion) or "there"),
        driver_cuda=None if number is None else (number // 1000, number % 1000 // 10),
        devices=tuple(devices),
    )


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def judge(hardware: Hardware, environ: Mapping[str, str], *, num_required: int = 0) -> list[Finding]:
    """Return findings on the driver and the devices.

    If fewer than ``num_required`` accelerators are visible, one finding is a problem; 0 omits this check.
    """
    found = [_judge_driver(hardware), *map(judge_device, hardware.devices)]
    name, num_there, num_seen = "CUDA_VISIBLE_DEVICES", len(hardware.devices), len(hardware.visible)
    is_cpu_chosen = environ.get("DS_ACCELERATOR") == "cpu"
    if num_there and not is_cpu_chosen and name in environ:
        what = (
            f"{environ[name]!r}: {plural(num_seen, 'accelerator')} of {plural(num_there, 'device')} visible"
        )
        todo = f"Unset it, or name indices below {num_there} or UUIDs that `nvidia-smi -L` lists."
        found.append(ok(name, what) if num_seen else note(name, f"{what}; ranks train on the CPU", todo))
    if num_required:
        what = f"{num_seen} visible; expected {num_required}"
        hides = "DS_ACCELERATOR" if is_cpu_chosen else name
        todo = "Install the vendor's driver (in a container, pass the devices in), or ask for fewer."
        if num_there >= num_required and hides in environ:
            todo = f"Unset {hides}, which hides devices."
        is_enough = num_seen >= num_required
        found.append(ok("accelerators", what) if is_enough else problem("accelerators", what, todo))
    return found


def _judge_driver(hardware: Hardware) -> Finding:
    if hardware.error:
        what = f"{hardware.driver or 'there'}, but NVML does not answer: {hardware.error}"
        todo = (
            "Reboot if driver and library have different releases, else install the driver's libraries (in a container, start it "
            "with the NVIDIA runtime and the driver capability 'utility')."
        )
        return problem("driver", what, todo)
    if hardware.driver is None:
        amd = plural(len(hardware.visible), "AMD device")
        return ok("driver", f"none of NVIDIA's: {amd if hardware.visible else 'ranks train on the CPU'}")
    if not hardware.devices:
        todo = "See the kernel's log (`dmesg | grep -i nvrm`); in a container, pass the devices in."
        return problem("driver", f"{hardware.driver}, and no device", todo)
    supported = "" if hardware.driver_cuda is None else f", CUDA up to {dotted(hardware.driver_cuda)}"
    return ok("driver", f"{hardware.driver}{supported}; NVML answers")


def judge_device(device: Device) -> Finding:
    name, free = f"device {device.idx}", max(0, device.total_bytes - device.used_bytes)
    what = f"{device.name}, {size_text(device.total_bytes)}, {size_text(free)} free"
    if device.capability is not None:
        what += f", compute capability {dotted(device.capability)}"
    if device.used_bytes <= max(_USED_BYTES, device.total_bytes // 10):
        return ok(name, what)
    todo = "Other programs use it (see `nvidia-smi`): wait, or choose devices by CUDA_VISIBLE_DEVICES."
    is_full = free < _FULL_SHARE * device.total_bytes
    return (problem if is_full else note)(name, what, todo)


def dotted(numbers: Sequence[int]) -> str:
    return ".".join(map(str, numbers))
