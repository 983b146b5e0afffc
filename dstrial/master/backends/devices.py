"""Find this machine's devices through their vendors' libraries, without torch."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from dstrial.errors import MasterError
from dstrial.ranks.identity import SHARE_VARIABLE, may_share

logger = logging.getLogger("dstrial.master")

SlotKind = Literal["cpu", "cuda", "rocm"]
_KFD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")  # processors that AMD's driver lists


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """A device, or CPU core, that one rank of a trial uses."""

    id: int  # index of the device, from 0
    kind: SlotKind
    brand: str
    uuid: str  # permanent name of a device; ``cpu-N`` for a CPU slot
    # value for ``CUDA_VISIBLE_DEVICES``: NVML's index, equal to CUDA's under ``CUDA_DEVICE_ORDER=PCI_BUS_ID``, or the name of
    # a MIG instance; "" if not NVIDIA's
    visible_as: str = ""


def find_slots(num: int | None = None) -> tuple[Slot, ...]:
    """Return a slot per accelerator of this machine; without any, a slot per CPU core.

    With ``DS_ACCELERATOR=cpu``, all slots are CPU slots. ``num`` overrides the number of slots. There may be more CPU slots
    than cores and, with ``DSTRIAL_SHARE_DEVICE=1``, more slots than accelerators.

    Raises:
        MasterError: ``num`` is negative, or exceeds the number of accelerators while slots may not share them.
    """
    if num is not None and num < 0:
        raise MasterError(
            f"--slots is {num}; expected at least 0. Leave it out to offer what the machine has."
        )
    accelerators = () if os.environ.get("DS_ACCELERATOR") == "cpu" else (tuple(_cuda()) or tuple(_rocm()))
    if accelerators:
        if num is None or num <= len(accelerators):
            return accelerators[:num]
        if may_share(os.environ):
            return shared_slots(accelerators, num)
        raise MasterError(
            f"--slots is {num}; expected at most {len(accelerators)}, the accelerators of this machine. "
            f"Set DS_ACCELERATOR=cpu to offer CPU slots instead, or {SHARE_VARIABLE}=1 to offer devices several times."
        )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    brand = _cpu_brand()
    return tuple(Slot(i, "cpu", brand, f"cpu-{i}") for i in range(cores if num is None else num))


def shared_slots(accelerators: Sequence[Slot], num: int) -> tuple[Slot, ...]:
    """Return ``num`` slots on a smaller number of accelerators, assigned round-robin."""
    logger.warning(
        "%s=1: %d slots of %d devices. Ranks that share a device train over gloo, through host memory: that is for tests and "
        "small experiments.",
        SHARE_VARIABLE,
        num,
        len(accelerators),
    )
    return tuple(dataclasses.replace(accelerators[i % len(accelerators)], id=i) for i in range(num))


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
        yield from nvml_slots(pynvml, os.environ.get("CUDA_VISIBLE_DEVICES"))
    finally:
        pynvml.nvmlShutdown()


def nvml_slots(nvml: Any, visible: str | None) -> Iterator[Slot]:
    """Yield a slot per NVIDIA device, in NVML's index order.

    ``nvml`` is the module pynvml. ``visible`` is ``CUDA_VISIBLE_DEVICES`` (indices, prefixes of UUIDs, MIG instances); None for
    all devices.
    """
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    # (UUID, name, value for CUDA_VISIBLE_DEVICES)
    devices = [
        (nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle), str(index))
        for index, handle in enumerate(handles)
    ]
    found = devices if visible is None else []
    for word in filter(None, map(str.strip, (visible or "").split(","))):
        if word.startswith("MIG-"):
            found.append((word, "NVIDIA MIG instance", word))
        found += [one for one in devices if word == one[2] or (len(word) > 4 and one[0].startswith(word))]
    for slot_id, (uuid, name, visible_as) in enumerate(found):
        yield Slot(slot_id, "cuda", name, uuid, visible_as)


def _rocm() -> Iterator[Slot]:
    """Yield a slot per AMD GPU: a node with SIMD units in the KFD driver's topology."""
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


def _cpu_brand() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() or "CPU"
