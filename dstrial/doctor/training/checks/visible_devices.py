"""``CUDA_VISIBLE_DEVICES`` as index, UUID and MIG UUID works with DeepSpeed.

``available_memory()`` of DeepSpeed 0.19.8, which ZeRO 1 and 2 call, turns the variable's words into integers; a UUID is none.
On CPU ranks only the CPU's answer is shown; without MIG instances theirs is not.
"""

from __future__ import annotations

from concurrent import futures
from typing import Any

from dstrial.doctor.training.bench import Bench, Launched, last_line
from dstrial.doctor.training.check import CheckFailedError, Finding, NotApplicableError


def run(bench: Bench) -> Finding:
    """Ask under each spelling, all at the same time."""
    if not bench.has_cuda:
        raise NotApplicableError("there is no CUDA device; nothing names devices here")
    spellings = _spellings()
    with futures.ThreadPoolExecutor(len(spellings)) as pool:
        asked = {
            kind: pool.submit(
                bench.launch,
                "visible",
                env={"CUDA_VISIBLE_DEVICES": value, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
                facts_of=f"visible-{kind}",
                may_fail=True,
            )
            for kind, value in spellings.items()
        }
        ended: dict[str, Launched] = {kind: future.result() for kind, future in asked.items()}
    rows: list[dict[str, Any]] = [
        {
            "spelling": kind,
            "value": spellings[kind],
            "available_gib": launched.facts.get("available_gib", "no answer"),
            "result": "answers" if launched.exit_code == 0 else last_line(launched.output),
        }
        for kind, launched in ended.items()
    ]
    bench.note(spellings=rows)
    wrong = [row for row in rows if row["result"] != "answers"]
    if wrong:
        raise CheckFailedError(
            "; ".join(f"{row['spelling']} {row['value']}: {row['result']}" for row in wrong),
            "Name devices by index, with CUDA_DEVICE_ORDER=PCI_BUS_ID, until this dstrial knows better.",
            ended[wrong[0]["spelling"]].end,
        )
    return Finding(
        f"available_memory() answers under {', '.join(spellings)}",
        "" if "MIG UUID" in spellings else "MIG UUIDs: no device is divided into MIG instances",
    )


def _spellings() -> dict[str, str]:
    import pynvml

    pynvml.nvmlInit()
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        found = {"index": "0", "UUID": _text(pynvml.nvmlDeviceGetUUID(handle))}
        try:
            current, _ = pynvml.nvmlDeviceGetMigMode(handle)
            instance = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, 0) if current else None
            if instance is not None:
                found["MIG UUID"] = _text(pynvml.nvmlDeviceGetUUID(instance))
        except pynvml.NVMLError:
            # Devices that know no MIG say so by an error.
            pass
    finally:
        pynvml.nvmlShutdown()
    return found


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
