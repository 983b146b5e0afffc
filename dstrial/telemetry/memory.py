"""What memory counters say of this rank, without a device being waited for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_STATUS = Path("/proc/self/status")
_COUNTERS = {"VmRSS": "process_memory_bytes", "VmHWM": "process_peak_memory_bytes"}


def process_memory(status: str) -> dict[str, int]:
    """Read the text of ``/proc/PID/status``: memory of a process now, and at its most."""
    found = {}
    for line in status.splitlines():
        name, _, value = line.partition(":")
        if name in _COUNTERS:
            found[_COUNTERS[name]] = int(value.split()[0]) * 1024
    return found


def memory_now(accelerator: Any) -> dict[str, int]:
    """Return this rank's counters in bytes; those that are not here are missing.

    Device counters are the allocator's own, on the host. DeepSpeed's CPU accelerator answers with the process's memory,
    which is called that.

    Ranks: any; no communication, no synchronisation.
    """
    try:
        found = process_memory(_STATUS.read_text())
    except OSError:
        found = {}
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
            continue  # a device that does not count this
    return found
