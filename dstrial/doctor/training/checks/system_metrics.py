"""A trial's reports reach the master: training, validation, samples per second.

System metrics and memory per rank are for later: dstrial's trials do not report them yet.
"""

from __future__ import annotations

from typing import Any

from dstrial.doctor.training.bench import Bench, last_line
from dstrial.doctor.training.check import CheckFailedError, Finding
from dstrial.doctor.training.checks.master_trial import write_experiment

_MISSING = "system metrics and memory per rank, which this dstrial does not report"


def run(bench: Bench) -> Finding:
    """Train one trial and ask the master for all that it was told."""
    config = write_experiment(bench.scratch, slots=1, stage=0)
    with bench.master(slots=1) as env:
        ended = bench.dstrial("run", str(config), str(config.parent), "--no-progress", env=env)
        if ended.exit_code != 0:
            raise CheckFailedError(
                f"`dstrial run` ended with {ended.exit_code}: {last_line(ended.output)}",
                "Read the log, below.",
                ended.end,
            )
        described: dict[str, Any] = bench.det("trial", "describe", "1", "--json", "--metrics", env=env)
    names: dict[str, set[str]] = {}
    for workload in described["workloads"]:
        for kind in ("training", "validation"):
            metrics = ((workload.get(kind) or {}).get("metrics") or {}).get("avgMetrics") or {}
            names.setdefault(kind, set()).update(metrics)
    bench.note(**{f"{kind}_metrics": sorted(found) for kind, found in names.items()})
    lacking = [name for name in ("loss", "samples_per_second") if name not in names.get("training", set())]
    lacking += [name for name in ("validation_loss",) if name not in names.get("validation", set())]
    if lacking:
        raise CheckFailedError(
            f"{', '.join(lacking)} did not arrive at the master", "Read the trial's log, below.", ended.end
        )
    return Finding(
        f"{len(names['training'])} training and {len(names['validation'])} validation metrics arrived",
        _MISSING,
    )
