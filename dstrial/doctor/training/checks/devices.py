"""Which device a rank sees, and ranks that share a device."""

from __future__ import annotations

import time
from concurrent import futures
from pathlib import Path
from typing import Any

from dstrial.doctor.training.bench import Bench, LaunchResult, last_line
from dstrial.doctor.training.check import CheckFailedError, Finding, NotApplicableError


def check_visible_devices(bench: Bench) -> Finding:
    """``CUDA_VISIBLE_DEVICES`` as index, UUID and MIG UUID works with DeepSpeed.

    ``available_memory()`` of DeepSpeed 0.19.8, which ZeRO 1 and 2 call, turns the variable's words into integers; a UUID is
    none. On CPU ranks only the CPU's answer is shown; without MIG instances theirs is not.
    """
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
        ended: dict[str, LaunchResult] = {kind: future.result() for kind, future in asked.items()}
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


_NAMED_WITHIN_S = 15.0
_SHARED = {"DSTRIAL_SHARE_DEVICE": "1"}
_REFUSAL = "the accelerators of this machine"


def check_shared_device(bench: Bench) -> Finding:
    """Two gloo ranks all-reduce and train ZeRO 1; a killed rank is named within 15 s.

    With one accelerator both ranks share it (``DSTRIAL_SHARE_DEVICE=1``). On the CPU they are two CPU ranks, and sharing a
    device is not shown.
    """
    env = {} if bench.is_cpu else _SHARED
    launched = bench.launch("two_ranks", slots=2, env=env, may_fail=True)
    if launched.exit_code != 0 and _REFUSAL in launched.output:
        raise NotApplicableError(
            "this dstrial's launcher does not let ranks share a device",
            "Try again with a dstrial that knows DSTRIAL_SHARE_DEVICE.",
        )
    _judge_ranks(launched)
    killed_s = _kill_one(bench, env)
    return Finding(
        f"all-reduce, ZeRO 1 and control channel work on two gloo ranks ({launched.facts['device']}); "
        f"the killed rank was named {killed_s:.1f} s after its death",
        "several ranks on one accelerator" if bench.is_cpu else "",
    )


def _judge_ranks(launched: LaunchResult) -> None:
    found: dict[str, Any] = dict(launched.facts)
    wrong = [
        f"{name} is {found.get(name)}; expected {expected}"
        for name, expected in (
            ("all_reduce", 3.0),
            ("control_channel", ["rank 0", "rank 1"]),
            ("finite", True),
        )
        if found.get(name) != expected
    ]
    if launched.exit_code != 0 or wrong:
        raise CheckFailedError(
            "; ".join(wrong) or f"the ranks ended with exit code {launched.exit_code}",
            "Read the traceback of the rank that failed first, below.",
            launched.end,
        )


def _kill_one(bench: Bench, env: dict[str, str]) -> float:
    """Have rank 1 kill itself in a step; return seconds until the launcher has ended."""
    noted = bench.scratch / "killed"
    bench.note(doing="two ranks, one of which is killed")
    fault = {"TRAINING_CHECK_FAULT": "kill:1:3", "TRAINING_CHECK_FAULT_TIME": str(noted)}
    launched = bench.launch(
        "two_ranks", slots=2, env={**env, **fault}, facts_of="two_ranks-killed", may_fail=True
    )
    ended_s = time.time()
    bench.note(doing="")
    if not noted.exists():
        raise CheckFailedError("rank 1 did not come to its death", "Read the output, below.", launched.end)
    seconds = ended_s - float(Path(noted).read_text(encoding="utf-8"))
    bench.note(named_after_s=round(seconds, 2), exit_code_after_kill=launched.exit_code)
    if launched.exit_code == 0 or "rank 1 failed first (killed by SIGKILL" not in launched.output:
        raise CheckFailedError(
            "the launcher does not name rank 1 as killed by SIGKILL",
            "Read what it said, below.",
            launched.end,
        )
    if seconds > _NAMED_WITHIN_S:
        raise CheckFailedError(
            f"the killed rank was named after {seconds:.1f} s; expected {_NAMED_WITHIN_S:g} s",
            "See what kept the other rank, below.",
            launched.end,
        )
    return seconds
