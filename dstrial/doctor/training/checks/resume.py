"""A resumed run reports what an uninterrupted run does, bit by bit per layout.

Three configurations with dropout are trained for 12 batches, and for 7 and on to 12. A run that is saved in ZeRO 1 and goes on
in ZeRO 3 computes in another order: its losses stay within a bound.
"""

from __future__ import annotations

from typing import Any

from dstrial.doctor.training.bench import Bench
from dstrial.doctor.training.check import CheckFailedError, Finding

_ACROSS_STAGES = 1e-4
"""Relative difference of losses when fp32 sums are added up in another order for five batches of training."""


def run(bench: Bench) -> Finding:
    """Train, resume, compare."""
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
