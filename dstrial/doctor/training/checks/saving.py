"""Checkpoints: saving behind the loop, many tensors, resuming."""

from __future__ import annotations

from typing import Any

from dstrial.doctor.training.bench import Bench
from dstrial.doctor.training.check import CheckFailedError, Finding

_EXPECTED_RATIO = 0.2


def check_save(bench: Bench) -> Finding:
    """How long a save behind the loop stops training, and whether its files are right.

    The same engine is saved by ``engine.save_checkpoint`` at the same batches. Training goes on, and changes the weights,
    while dstrial writes; afterwards both files are compared bit by bit. On the CPU the copy competes with training for the
    same memory and cores, so the ratio there says little about a device.
    """
    width = 256 if bench.is_cpu else 1024
    launched = bench.launch("save", "--width", str(width), "--scratch", str(bench.scratch))
    found: dict[str, Any] = dict(launched.facts)
    if found["different"]:
        raise CheckFailedError(
            f"{len(found['different'])} values differ from what engine.save_checkpoint wrote at the same batch: "
            f"{', '.join(found['different'][:3])}",
            "Set data.dstrial.background_saving to false until this is mended, and report it.",
            launched.end,
        )
    ratio = float(found["stall_ratio"])
    if not bench.is_cpu and ratio >= _EXPECTED_RATIO:
        summary = f"bits equal, but the stall is {ratio:.2f} of engine.save_checkpoint (expected under {_EXPECTED_RATIO:g})"
        raise CheckFailedError(
            summary, "See whether host memory can be pinned (ulimit -l) and is free.", launched.end
        )
    return Finding(
        f"{found['num_values']} values of {found['megabytes']:.0f} MB equal bit by bit; stall {found['stall_s'] * 1e3:.1f} ms "
        f"(the loop was held {found['loop_held_s'] * 1e3:.1f} ms), {ratio:.2f} of engine.save_checkpoint "
        f"({found['bare_s'] * 1e3:.0f} ms)",
        "the stall of a device (copies compete with training on the CPU)" if bench.is_cpu else "",
    )


def check_pinned_buffers(bench: Bench) -> Finding:
    """Over a thousand small tensors are saved behind the loop; training goes on.

    The process has one context: on CUDA the copies go through pinned memory, whose registration must leave no error for the
    next kernel and make no context on another device. On the CPU only the saving is shown.
    """
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


_ACROSS_STAGES = 1e-4
"""Relative difference of losses when fp32 sums are added up in another order for five batches of training."""


def check_resume(bench: Bench) -> Finding:
    """A resumed run reports what an uninterrupted run does, to the bit in one layout.

    Three configurations with dropout are trained for 12 batches, and for 7 and on to 12. A run that is saved in ZeRO 1 and
    goes on in ZeRO 3 computes in another order: its losses stay within a bound.
    """
    launched = bench.launch("resume", slots=bench.num_slots, env={"CUBLAS_WORKSPACE_CONFIG": ":4096:8"})
    rows: list[dict[str, Any]] = list(launched.facts["runs"])
    wrong = [f"{row['configuration']}: {row['error']}" for row in rows if "error" in row]
    wrong += [
        f"{row['configuration']}: losses differ by {row['greatest_difference']:.3g}"
        for row in rows
        if "error" not in row
        and row["greatest_difference"] > (_ACROSS_STAGES if row["across_stages"] else 0.0)
    ]
    if wrong:
        raise CheckFailedError(
            "; ".join(wrong),
            "Compare the losses in the table; report this with the JSON if they differ in the same layout.",
            launched.end,
        )
    exact = [row for row in rows if not row["across_stages"]]
    across = [row["greatest_difference"] for row in rows if row["across_stages"]]
    return Finding(
        f"{len(exact)} configurations go on equal to the last bit; ZeRO 1 -> 3 within {max(across):.2g} "
        f"(bound {_ACROSS_STAGES:g})",
        "an accelerator's kernels and random states" if bench.is_cpu else "",
    )
