"""Trials through a master of the check's own."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from dstrial.doctor.training.bench import Bench, last_line
from dstrial.doctor.training.check import CheckFailedError, Finding
from dstrial.doctor.training.programs.program import deepspeed_config

_MODEL_DEF = "from dstrial.doctor.training.programs.trial import TextTrial  # noqa: F401\n"


def check_master_trial(bench: Bench) -> Finding:
    """A ZeRO 1 trial goes through a master of its own from submission to COMPLETED.

    On CPU ranks the master's choice of devices (``CUDA_VISIBLE_DEVICES``) is not shown.
    """
    began_s = time.monotonic()
    slots = bench.num_slots
    config = write_experiment(bench.scratch, slots=slots, stage=1)
    with bench.master(slots=slots) as env:
        up_s = time.monotonic() - began_s
        ended = bench.dstrial("run", str(config), str(config.parent), "--no-progress", env=env)
        bench.note(up_s=round(up_s, 1), run_s=round(ended.seconds, 1))
        # The first of a new master.
        (described,) = bench.det("experiment", "describe", "1", "--json", env=env)
        state = str(described["experiment"]["state"]).removeprefix("STATE_")
        bench.note(state=state)
    if ended.exit_code != 0 or state != "COMPLETED":
        raise CheckFailedError(
            f"the experiment is {state} and `dstrial run` ended with {ended.exit_code}: {last_line(ended.output)}",
            "Read the log of the trial, below.",
            ended.end,
        )
    kind = "CPU" if bench.is_cpu else "accelerator"
    return Finding(
        f"COMPLETED on {slots} {kind} slot(s): master up in {up_s:.1f} s, trial in {ended.seconds:.1f} s",
        "the devices that a master gives to its trials" if bench.is_cpu else "",
    )


def write_experiment(scratch: Path, *, slots: int, stage: int, **fields: Any) -> Path:
    """Write an experiment config and its context directory; returns the config's path."""
    context = scratch / "definition"
    context.mkdir()
    (context / "model_def.py").write_text(_MODEL_DEF, encoding="utf-8")
    config = {
        "name": "doctor",
        "entrypoint": "python3 -m dstrial.launch --trial model_def:TextTrial",
        "hyperparameters": {"deepspeed_config": deepspeed_config(stage)},
        "searcher": {
            "name": "single",
            "metric": "validation_loss",
            "smaller_is_better": True,
            "max_length": {"batches": 20},
        },
        "resources": {"slots_per_trial": slots},
        "scheduling_unit": 5,
        "min_validation_period": {"batches": 10},
        "max_restarts": 0,
        "reproducibility": {"experiment_seed": 3},
        **fields,
    }
    path = context / "experiment.yaml"
    # JSON is YAML.
    path.write_text(json.dumps(config, indent=1), encoding="utf-8")
    return path


_MISSING = "system metrics and memory per rank, which this dstrial does not report"


def check_system_metrics(bench: Bench) -> Finding:
    """A trial's reports reach the master: training, validation, samples per second.

    System metrics and memory per rank are for later: dstrial's trials do not report them yet.
    """
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
