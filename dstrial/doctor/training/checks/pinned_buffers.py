"""Over a thousand small tensors are saved behind the loop; training goes on.

The process has one context: on CUDA the copies go through pinned memory, whose registration must leave no error for the next
kernel and make no context on another device. On the CPU only the saving is shown.
"""

from __future__ import annotations

from dstrial.doctor.training.bench import Bench
from dstrial.doctor.training.check import CheckFailedError, Finding


def run(bench: Bench) -> Finding:
    """Save many small tensors."""
    launched = bench.launch("many_tensors", "--layers", "100" if bench.is_cpu else "200")
    found = launched.facts
    if not found["finite"]:
        raise CheckFailedError(
            "a loss after the saves is not finite", "Report this with the JSON.", launched.end
        )
    contexts = int(found["contexts"])
    if bench.has_cuda and contexts > 1:
        raise CheckFailedError(
            f"the process has contexts on {contexts} devices; expected one",
            "Report this with the JSON.",
            launched.end,
        )
    told = f"{found['num_tensors']} tensors saved {found['num_saves']} times, training goes on"
    if bench.has_cuda:
        seen = (
            "one context" if contexts == 1 else "contexts cannot be told (process ids of another namespace)"
        )
        return Finding(
            f"{told}; {seen}", "" if contexts else "contexts per process, which NVML does not tell here"
        )
    return Finding(told, "pinned memory and contexts of a device")
