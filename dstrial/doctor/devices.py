"""Check this machine's accelerators: driver, processes and visible devices."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import psutil  # type: ignore[import-untyped]  # no stubs are installed

from dstrial.doctor.finding import Finding, note, ok, plural, problem
from dstrial.visible_text import size_text

T = TypeVar("T")

_KERNEL_MODULE = Path("/proc/driver/nvidia/version")
_KFD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")
_FULL_SHARE = 0.1  # if a smaller fraction of a device's memory is free, that is a problem
_UNSEEN_BYTES = 1 << 30  # used memory beyond this belongs to processes; the driver uses less


@dataclasses.dataclass(frozen=True, slots=True)
class Device:
    """One NVIDIA device, as its driver describes it."""

    idx: int  # driver's index, as with CUDA_DEVICE_ORDER=PCI_BUS_ID
    name: str
    uuid: str
    total_bytes: int
    used_bytes: int
    capability: tuple[int, int] | None = None  # None if unknown
    users: tuple[str, ...] = ()  # processes with memory on the device, described
    is_mig: bool = False
    mig_uuids: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Hardware:
    """The accelerators of this machine."""

    driver: str | None = None  # release of NVIDIA's driver, "there" if unknown; None without one
    driver_cuda: tuple[int, int] | None = None  # newest CUDA release that the driver supports
    error: str = ""  # why NVML failed although there is a driver
    devices: tuple[Device, ...] = ()
    num_amd: int = 0


def measure() -> Hardware:
    """Read NVIDIA devices from the driver (NVML), AMD devices from the kernel."""
    return dataclasses.replace(_nvidia(), num_amd=_num_amd())


def _nvidia() -> Hardware:
    driver = "there" if _KERNEL_MODULE.exists() or Path("/dev/nvidiactl").exists() else None
    try:
        import pynvml
    except ImportError:
        return Hardware(driver=driver, error="" if driver is None else "the package nvidia-ml-py is missing")
    try:
        pynvml.nvmlInit()
        return _query(pynvml)
    except pynvml.NVMLError as error:
        return Hardware(driver=driver, error="" if driver is None else str(error))
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _query(nvml: Any) -> Hardware:
    def offered(call: Callable[..., T], *arguments: Any) -> T | None:
        try:
            return call(*arguments)
        except nvml.NVMLError:
            return None

    number = offered(nvml.nvmlSystemGetCudaDriverVersion_v2)
    return Hardware(
        driver=_text(offered(nvml.nvmlSystemGetDriverVersion) or "there"),
        driver_cuda=None if number is None else (number // 1000, number % 1000 // 10),
        devices=tuple(_device(nvml, idx, offered) for idx in range(nvml.nvmlDeviceGetCount())),
    )


def _device(nvml: Any, idx: int, offered: Callable[..., Any]) -> Device:
    handle = nvml.nvmlDeviceGetHandleByIndex(idx)
    memory = offered(nvml.nvmlDeviceGetMemoryInfo, handle)
    mig = offered(nvml.nvmlDeviceGetMigMode, handle)
    is_mig = mig is not None and mig[0] == nvml.NVML_DEVICE_MIG_ENABLE
    num_instances = (offered(nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0) if is_mig else 0
    found = [offered(nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, i) for i in range(num_instances)]
    instances = [instance for instance in found if instance is not None]  # indexes have gaps
    processes = [
        process
        for one in instances or [handle]
        for process in offered(nvml.nvmlDeviceGetComputeRunningProcesses, one) or ()
    ]
    capability = offered(nvml.nvmlDeviceGetCudaComputeCapability, handle)
    return Device(
        idx=idx,
        name=_text(offered(nvml.nvmlDeviceGetName, handle) or "NVIDIA device"),
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        total_bytes=0 if memory is None else int(memory.total),
        used_bytes=0 if memory is None else int(memory.used),
        capability=None if capability is None else (int(capability[0]), int(capability[1])),
        users=tuple(_user(int(process.pid), process.usedGpuMemory) for process in processes),
        is_mig=is_mig,
        mig_uuids=tuple(_text(nvml.nvmlDeviceGetUUID(instance)) for instance in instances),
    )


def _user(pid: int, num_bytes: int | None) -> str:
    """Return text on a process that uses a device.

    In a container the driver may report a ``pid`` of the host; the process then may not be found here, and is described without
    its owner.
    """
    owner = "not visible from here"
    # Do not show the process's arguments, which may contain secrets.
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        owner = f"{process.name()} of {process.username()}"
    memory = "" if num_bytes is None else f", {size_text(num_bytes)}"
    return f"process {pid} ({owner}{memory})"


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


def visible(hardware: Hardware, environ: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Return the UUIDs of visible NVIDIA devices, and the first invalid entry, if any.

    Both follow from ``CUDA_VISIBLE_DEVICES``. CUDA ignores all entries after an invalid one.
    """
    whole = [device.uuid for device in hardware.devices if not device.is_mig]
    instances = [uuid for device in hardware.devices for uuid in device.mig_uuids]
    value = environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return whole + instances, []
    found: list[str] = []
    for word in [word.strip() for word in value.split(",") if word.strip()]:
        if word.isdigit() and int(word) < len(hardware.devices):
            device = hardware.devices[int(word)]
            found.append(device.mig_uuids[0] if device.is_mig and device.mig_uuids else device.uuid)
        elif len(word) > 4 and (match := [uuid for uuid in whole + instances if uuid.startswith(word)]):
            found.append(match[0])
        else:
            return found, [word]
    return found, []


def judge(hardware: Hardware, environ: Mapping[str, str], *, num_required: int = 0) -> list[Finding]:
    findings = [_judge_driver(hardware)]
    for device in hardware.devices:
        findings += judge_device(device)
    findings += _judge_visibility(hardware, environ)
    return findings + _judge_required(hardware, environ, num_required)


def _judge_driver(hardware: Hardware) -> Finding:
    if hardware.error:
        todo = (
            "Reboot, or reload the kernel module, so that it is the release of the installed library."
            if "mismatch" in hardware.error.lower()
            else "Install the driver's libraries of the same release (in a container, start it with the NVIDIA runtime and "
            "the driver capability 'utility'); without NVML the master offers CPU slots."
        )
        what = f"{hardware.driver or 'there'}, but NVML does not answer: {hardware.error}"
        return problem("driver", what, todo)
    if hardware.driver is None:
        rest = f"; {plural(hardware.num_amd, 'AMD device')}" if hardware.num_amd else ""
        return ok("driver", f"none of NVIDIA's{rest or ': ranks train on the CPU'}")
    if not hardware.devices:
        return problem(
            "driver",
            f"{hardware.driver}, and no device",
            "Look into the kernel's log (`dmesg | grep -i nvrm`) for why it finds none; in a container, pass the devices in.",
        )
    serves = "" if hardware.driver_cuda is None else f", CUDA up to {dotted(hardware.driver_cuda)}"
    return ok("driver", f"{hardware.driver}{serves}; NVML answers")


def judge_device(device: Device) -> list[Finding]:
    name = f"device {device.idx}"
    free = device.total_bytes - device.used_bytes
    facts = [device.name, size_text(device.total_bytes), f"{size_text(max(0, free))} free"]
    if device.capability is not None:
        facts.append(f"compute capability {dotted(device.capability)}")
    if device.is_mig:
        facts.append(plural(len(device.mig_uuids), "MIG instance"))
    found = [ok(name, ", ".join(facts))]
    if device.is_mig and not device.mig_uuids:
        todo = "Make instances (`nvidia-smi mig -cgi … -C`), or switch MIG off (`nvidia-smi -mig 0`)."
        found.append(problem(f"{name} MIG", "divided into no MIG instance", todo))
    used = f"in use by {', '.join(device.users)}" if device.users else ""
    if not used and device.used_bytes > max(_UNSEEN_BYTES, device.total_bytes // 10):
        used = f"{size_text(device.used_bytes)} are taken by processes that cannot be seen from here"
    if used:
        is_full = device.total_bytes > 0 and free < _FULL_SHARE * device.total_bytes
        todo = (
            "Wait for them, or choose other devices: `CUDA_VISIBLE_DEVICES=… dstrial up` (or `dstrial run`); the master does "
            "not see what other programs use."
        )
        found.append((problem if is_full else note)(f"{name} use", f"{used}; {size_text(free)} free", todo))
    return found


def _judge_visibility(hardware: Hardware, environ: Mapping[str, str]) -> list[Finding]:
    name = "CUDA_VISIBLE_DEVICES"
    value = environ.get(name)
    if value is None or not hardware.devices:
        return []
    seen, unknown = visible(hardware, environ)
    if unknown and unknown != ["-1"]:
        what = f"{value!r} names no device of this machine by {unknown[0]!r}; what comes after that word is ignored"
        todo = f"Name indices below {len(hardware.devices)} or UUIDs that `nvidia-smi -L` lists, or unset it."
        return [problem(name, what, todo)]
    if not seen:
        what = f"{value!r} hides all {len(hardware.devices)} devices: ranks train on the CPU"
        return [note(name, what, "Unset it to train on them.")]
    return [ok(name, f"{value!r}: {len(seen)} of {len(hardware.devices)} devices")]


def _judge_required(hardware: Hardware, environ: Mapping[str, str], num_required: int) -> list[Finding]:
    is_cpu_chosen = environ.get("DS_ACCELERATOR") == "cpu"
    asked_by = "--require-gpus"
    if num_required == 0 and environ.get("DS_ACCELERATOR") == "cuda":
        num_required, asked_by = 1, "DS_ACCELERATOR=cuda"
    if num_required == 0:
        return []
    num_there = len(hardware.devices) or hardware.num_amd
    num_seen = len(visible(hardware, environ)[0]) or (0 if hardware.devices else hardware.num_amd)
    num_seen = 0 if is_cpu_chosen else num_seen
    if num_seen >= num_required:
        return [ok("accelerators", f"{num_seen} visible, {num_required} asked for ({asked_by})")]
    if not num_there:
        todo = "Install the vendor's driver (in a container, pass the devices in), or train on the CPU without this requirement."
    elif num_there < num_required:
        todo = "Ask for fewer, or move to a machine that has more."
    else:
        hides = (
            "DS_ACCELERATOR, which keeps DeepSpeed on the CPU" if is_cpu_chosen else "CUDA_VISIBLE_DEVICES"
        )
        todo = f"Unset {hides}."
    return [problem("accelerators", f"{num_seen} visible; expected {num_required} ({asked_by})", todo)]


def dotted(numbers: Sequence[int]) -> str:
    return ".".join(map(str, numbers))
