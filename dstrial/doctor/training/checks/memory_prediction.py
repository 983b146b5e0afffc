"""Dry runs' predicted memory of six configurations, against what training takes.

A dry run needs no device; measured is torch's peak of allocated memory, so on the CPU only the prediction is shown.
"""

from __future__ import annotations

import itertools
import json
from typing import Any

from dstrial.doctor.training.bench import Bench
from dstrial.doctor.training.check import CheckFailedError, Finding
from dstrial.doctor.training.programs.program import deepspeed_config
from dstrial.engine.dryrun.process import DryRunError, dry_runs
from dstrial.engine.dryrun.values import DryRunRequest

_PROGRAMS = "dstrial.doctor.training.programs"
_SHAPE = {"width": 512, "num_layers": 4, "num_heads": 8, "block_size": 256, "fused": True}
_MICRO_BATCH = 8
_WITHIN = 0.15


def run(bench: Bench) -> Finding:
    """Predict, measure, compare."""
    chosen = [(precision, stage) for precision, stage in itertools.product(("fp32", "bf16"), (0, 1, 3))]
    bench.note(doing="dry runs")
    rows = _predicted(bench, chosen)
    bench.note(doing="", configurations=rows)
    if not bench.has_cuda:
        return Finding(
            f"predicted {min(row['predicted_mib'] for row in rows):.0f} to {max(row['predicted_mib'] for row in rows):.0f} MiB "
            f"for {len(rows)} configurations",
            "the measured memory: torch counts a device's only",
        )
    launched = bench.launch(
        "memory",
        "--configurations",
        json.dumps(chosen),
        "--shape",
        json.dumps(_SHAPE),
        "--records",
        str(_MICRO_BATCH),
    )
    for row, measured in zip(rows, launched.facts["measured_mib"], strict=True):
        row |= {
            "measured_mib": measured,
            "error_percent": round(100 * (row["predicted_mib"] / measured - 1), 1),
        }
    bench.note(configurations=rows)
    worst = max(rows, key=lambda row: abs(row["error_percent"]))
    told = f"{len(rows)} predictions within {abs(worst['error_percent']):.1f} % of torch's peak"
    if abs(worst["error_percent"]) > 100 * _WITHIN:
        raise CheckFailedError(
            f"{told}; the worst is {worst['precision']} with ZeRO {worst['stage']}; expected {100 * _WITHIN:.0f} %",
            "Have dsat measure instead of predict, and report the table.",
            launched.end,
        )
    return Finding(told)


def _predicted(bench: Bench, chosen: list[tuple[str, int]]) -> list[dict[str, Any]]:
    requests = [
        DryRunRequest(
            workload="dstrial.engine.dryrun.measure:ModelWorkload",
            shared_options={"model": f"{_PROGRAMS}.gpt:model", "batch": f"{_PROGRAMS}.gpt:batch"},
            options={"shape": _SHAPE},
            deepspeed_config=deepspeed_config(stage, precision),
            world_size=1,
            target="cuda" if bench.has_cuda else "cpu",
        )
        for precision, stage in chosen
    ]
    rows: list[dict[str, Any]] = []
    found = dry_runs(requests, deadline_s=max(bench.left_s - 5, 1), num_parallel=2)
    for (precision, stage), one in zip(chosen, found, strict=True):
        if isinstance(one, DryRunError):
            raise CheckFailedError(
                f"the dry run of {precision} with ZeRO {stage} failed: {one}", "Follow the message."
            )
        peak = one.device.peak(_MICRO_BATCH) / 2**20
        rows.append({"precision": precision, "stage": stage, "predicted_mib": round(peak, 1)})
    return rows
