"""How long a save behind the loop stops training, and whether its files are right.

The same engine is saved by ``engine.save_checkpoint`` at the same batches. Training goes on, and changes the weights, while
dstrial writes; afterwards both files are compared bit by bit. On the CPU the copy competes with training for the same memory
and cores, so the ratio there says little about a device.
"""

from __future__ import annotations

from typing import Any

from dstrial.doctor.training.bench import Bench
from dstrial.doctor.training.check import CheckFailedError, Finding

_EXPECTED_RATIO = 0.2


def run(bench: Bench) -> Finding:
    """Train and save, compare."""
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
