"""ZeRO 0 to 3 in fp32, bf16 and fp16: every combination trains here.

fp16 starts with a loss scale of 2**32, which must overflow, skip the step and halve; not in stage 0. On CPU
ranks gloo carries the gradients; NCCL, a device's kernels and, where torch has no fp16 for this CPU, fp16 are not shown.
"""

from __future__ import annotations

from typing import Any

from dstrial.doctor.training.bench import Bench
from dstrial.doctor.training.check import CheckFailedError, Finding


def run(bench: Bench) -> Finding:
    """Train and judge every combination."""
    launched = bench.launch("precision", slots=bench.num_slots, may_fail=True)
    rows: list[dict[str, Any]] = list(launched.facts.get("configurations", []))
    wrong = [
        f"{row['precision']} with ZeRO {row['stage']}: {problem}"
        for row in rows
        if (problem := problem_of(row))
    ]
    if launched.exit_code != 0 and not wrong:
        wrong = [f"the ranks ended with exit code {launched.exit_code} after {len(rows)} configurations"]
    if wrong:
        raise CheckFailedError(
            "; ".join(wrong), "Use the combinations that the table shows as finite.", launched.end
        )
    trained = [row for row in rows if row["result"] == "finite"]
    left_out = sorted({row["precision"] for row in rows} - {row["precision"] for row in trained})
    halved = [row for row in trained if row["scales"]]
    summary = f"{len(trained)} combinations of ZeRO stage and precision train with finite losses"
    if halved:
        summary += f"; fp16 skipped {halved[0]['skipped']} steps, scale 2^32 -> {halved[0]['scales'][-1]:.4g}"
    return Finding(summary, _not_shown(bench, left_out))


def problem_of(row: dict[str, Any]) -> str:
    """Return what is wrong with a combination; empty if nothing is. Pure."""
    if row.get("result") not in ("finite", "not supported by this device", "refused before training"):
        return str(row.get("result", "it has no result"))
    scales = row.get("scales")
    if not scales:
        return ""
    if not row["skipped"]:
        return "no step was skipped at a loss scale of 2^32"
    if scales[-1] >= 2**32:
        return f"the loss scale is still {scales[-1]:g} after an overflow"
    return ""


def _not_shown(bench: Bench, left_out: list[str]) -> str:
    told = []
    if bench.is_cpu:
        told.append("kernels and collectives of an accelerator")
    if left_out:
        told.append(f"{', '.join(left_out)}, which this device does not support")
    if "fp16" not in left_out:
        told.append("fp16 in ZeRO 0, whose losses DeepSpeed does not scale")
    return "; ".join(told)
