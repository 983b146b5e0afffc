"""After SIGKILL in a step, or running out of memory, the next trial trains.

On the CPU torch's allocator is asked for more than any machine has; a device is filled to its end. What NVML, or the kernel,
tells of free memory must come back to what it was.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from dstrial.doctor.training.bench import Bench, last_line
from dstrial.doctor.training.check import CheckFailedError, Finding
from dstrial.doctor.training.processes import MARKER_VARIABLE, marked

_SLACK_BYTES = 2**28
_BACK_WITHIN_S = 20.0


def run(bench: Bench) -> Finding:
    """Fail twice, then train."""
    before = used_bytes(bench)
    own = set(marked(os.environ[MARKER_VARIABLE]))
    rows: list[dict[str, Any]] = []
    for kind, fault, sign in (
        ("SIGKILL inside a step", "kill:0:3", "SIGKILL"),
        ("out of memory", "memory:0:3", "memory"),
    ):
        bench.note(doing=kind)
        launched = bench.launch(
            "faulty",
            env={"TRAINING_CHECK_FAULT": fault},
            facts_of=f"faulty-{fault.partition(':')[0]}",
            may_fail=True,
        )
        if launched.exit_code == 0 or sign not in launched.output:
            raise CheckFailedError(
                f"{kind}: the launcher ended with {launched.exit_code} and does not tell of it: {last_line(launched.output)}",
                "Read what it said, below.",
                launched.end,
            )
        back_s = _wait_until_back(bench, before, own)
        grown = used_bytes(bench) - before
        rows.append({"fault": kind, "grown_mib": round(grown / 2**20, 1), "back_after_s": round(back_s, 1)})
        bench.note(faults=rows)
        if back_s >= _BACK_WITHIN_S:
            num_left = len(set(marked(os.environ[MARKER_VARIABLE])) - own)
            raise CheckFailedError(
                f"{kind}: {grown / 2**20:.0f} MiB more are in use than before, {num_left} processes are left",
                "See with nvidia-smi, or ps, what holds the memory.",
                launched.end,
            )
    bench.note(doing="the next trial")
    bench.launch("faulty")
    bench.note(doing="")
    back = "no process is left"
    if bench.has_cuda:
        back = f"NVML's used memory is back within {max(row['grown_mib'] for row in rows):g} MiB"
    return Finding(
        f"SIGKILL and out of memory are told, {back}, the next trial trains",
        "" if bench.has_cuda else "a device's memory",
    )


def _wait_until_back(bench: Bench, before: int, own: set[int]) -> float:
    """Return the seconds until memory and processes are back, or ``_BACK_WITHIN_S``."""
    began_s = time.monotonic()
    while (waited_s := time.monotonic() - began_s) < _BACK_WITHIN_S:
        left = set(marked(os.environ[MARKER_VARIABLE])) - own
        # Others use the memory of the host, too; there only processes count.
        if not left and (not bench.has_cuda or used_bytes(bench) <= before + _SLACK_BYTES):
            break
        time.sleep(0.1)
    return waited_s


def used_bytes(bench: Bench) -> int:
    """Return used bytes of all devices by NVML; without devices, the machine's."""
    if not bench.has_cuda:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        kib = {line.split(":")[0]: int(line.split()[1]) for line in lines}
        return 1024 * (kib["MemTotal"] - kib["MemAvailable"])
    import pynvml

    pynvml.nvmlInit()
    try:
        return sum(
            int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(idx)).used)
            for idx in range(pynvml.nvmlDeviceGetCount())
        )
    finally:
        pynvml.nvmlShutdown()
