"""The devices of this machine, found through their vendors' libraries and without torch."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from dstrial.errors import MasterError

SlotKind = Literal["cpu", "cuda", "rocm"]
_KFD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """One device that a trial can be given.

    Attributes:
        id: index of the device, from 0.
        kind: what it is.
        brand: its name.
        uuid: what names it for good; a CPU slot's own name otherwise.
        visible_as: what names it in ``CUDA_VISIBLE_DEVICES``: NVML's index, which is CUDA's under
            ``CUDA_DEVICE_ORDER=PCI_BUS_ID``, or the UUID of a MIG instance, which has no index there. Empty otherwise.
    """

    id: int
    kind: SlotKind
    brand: str
    uuid: str
    visible_as: str = ""


def find_slots(num: int | None = None) -> tuple[Slot, ...]:
    """Return the accelerators of this machine, or CPU slots where there are none.

    Args:
        num: offer this many CPU slots instead, which may be more than there are cores; or, on a machine with
            accelerators and without ``DS_ACCELERATOR=cpu``, this many of them.

    Raises:
        MasterError: ``num`` is negative, or more than there are accelerators.
    """
    if num is not None and num < 0:
        raise MasterError(
            f"--slots is {num}; expected at least 0. Leave it out to offer what the machine has."
        )
    accelerators = () if os.environ.get("DS_ACCELERATOR") == "cpu" else (tuple(_cuda()) or tuple(_rocm()))
    if accelerators:
        if num is not None and num > len(accelerators):
            raise MasterError(
                f"--slots is {num}; expected at most {len(accelerators)}, the accelerators of this machine. "
                "Set DS_ACCELERATOR=cpu to offer CPU slots instead."
            )
        return accelerators[:num]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    brand = _cpu_brand()
    return tuple(Slot(i, "cpu", brand, f"cpu-{i}") for i in range(cores if num is None else num))


def _cuda() -> Iterator[Slot]:
    if not Path("/dev/nvidiactl").exists():
        return
    try:
        import pynvml
    except ImportError:
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return
    try:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        wanted = None if visible is None else [word.strip() for word in visible.split(",") if word.strip()]
        found = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            found.append(
                (str(index), _text(pynvml.nvmlDeviceGetUUID(handle)), _text(pynvml.nvmlDeviceGetName(handle)))
            )
        if wanted is not None:
            found = [
                device
                for word in wanted
                for device in found
                if word == device[0] or (len(word) > 4 and device[1].startswith(word))
            ]
        for slot_id, (index_there, uuid, name) in enumerate(found):
            yield Slot(slot_id, "cuda", name, uuid, index_there)
    finally:
        pynvml.nvmlShutdown()


def _rocm() -> Iterator[Slot]:
    """Yield AMD devices as the kernel driver lists them: nodes of its topology that have SIMD units."""
    if not Path("/dev/kfd").exists():
        return
    index = 0
    for node in sorted(_KFD_NODES.glob("*"), key=lambda path: int(path.name)):
        with contextlib.suppress(OSError, ValueError):
            lines = (node / "properties").read_text().split("\n")
            properties = dict(line.split(maxsplit=1) for line in lines if " " in line)
            if int(properties.get("simd_count", "0")) == 0:
                continue
            name = (node / "name").read_text().strip() or "AMD GPU"
            yield Slot(index, "rocm", name, str(index))
            index += 1


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _cpu_brand() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() or "CPU"
