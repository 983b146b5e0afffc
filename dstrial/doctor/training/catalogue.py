"""All training checks, most telling first."""

from __future__ import annotations

from collections.abc import Sequence

from dstrial.doctor.training.check import Check
from dstrial.errors import DstrialError

_CHECKS = "dstrial.doctor.training.checks"


def _check(name: str, title: str, needs_s: float, deadline_s: float, *, always: bool = False) -> Check:
    return Check(name, title, f"{_CHECKS}.{name.replace('-', '_')}", needs_s, deadline_s, always)


CHECKS: tuple[Check, ...] = (
    _check("environment", "versions, driver, devices in torch and NVML, bf16", 5, 90, always=True),
    _check("precision", "ZeRO 0 to 3 in fp32, bf16 and fp16 train", 15, 150),
    _check("master-trial", "a ZeRO 1 trial through the embedded master", 15, 120),
    _check("visible-devices", "CUDA_VISIBLE_DEVICES as index, UUID and MIG UUID", 10, 90),
    _check("shared-device", "two gloo ranks on one device; a killed one is named", 20, 120),
    _check("save", "checkpoints behind the loop: the stall, and every bit of the files", 12, 90),
    _check("resume", "a resumed run equals an uninterrupted one, across ZeRO stages too", 20, 150),
    _check("synchronisation", "nothing of dstrial's waits for the device between reports", 12, 90),
    _check(
        "pinned-buffers", "more than 1,000 small tensors saved through pinned memory, one context", 12, 90
    ),
    _check("recovery", "SIGKILL inside a step and out of memory on purpose, then the next trial", 25, 150),
    _check("flops", "matmul peak, FLOPs and MFU of a small GPT", 12, 90),
    _check("dsat-worker", "five configurations in a living worker leave nothing behind", 15, 120),
    _check("system-metrics", "metrics of a trial arrive at the master", 15, 120),
    _check("warm-start", "a warm start trains as a fresh process does", 3, 60),
    _check(
        "operators", "DeepSpeed's FusedAdam and CPUAdam compile, behind a lock that a kill has left", 60, 300
    ),
    _check("compile", "torch.compile gives the same losses", 25, 240),
    _check("loop-overhead", "what dstrial's loop adds to a step", 12, 90),
    _check("memory-prediction", "predicted against measured memory of six configurations", 25, 150),
)


def chosen(only: Sequence[str], skip: Sequence[str], checks: Sequence[Check] = CHECKS) -> tuple[Check, ...]:
    """Return the checks to run, in their order.

    Args:
        only: names; empty for all. Those that always run are not left out for want of their name.
        skip: names.
        checks: all that there are.

    Raises:
        DstrialError: a name is none.
    """
    known = {check.name for check in checks}
    for option, names in (("--only", only), ("--skip", skip)):
        unknown = [name for name in names if name not in known]
        if unknown:
            raise DstrialError(
                f"{option} is {', '.join(unknown)}; expected names of training checks. "
                f"Choose from {', '.join(check.name for check in checks)}."
            )
    return tuple(
        check
        for check in checks
        if (not only or check.name in only or check.always) and check.name not in skip
    )
