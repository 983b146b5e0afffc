"""Dry-run the models of the benchmark's workloads, as ``predict`` does with a user's, and keep what it starts from.

Usage::

    python benchmarks/dsat_dry_runs.py DIR [--workloads 0 1 ...]

One file per workload, as ``dsat_dry_runs/`` holds them for ``dsat.py``. The engines are DeepSpeed's own under fake
tensors; nothing of the surfaces' formulas or hidden errors is in these files.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from dsat_workloads import WORKLOADS, Workload

from dstrial.dsat.dry_runs import trace_space
from dstrial.dsat.predictor.config_groups import ConfigGroups
from dstrial.dsat.predictor.hardware import DEVICES, nominal_machine
from dstrial.dsat.space import Structure
from dstrial.engine.dryrun.values import DryRunRequest

_DEADLINE_S = 7200.0
_ROOT = Path(__file__).resolve().parents[1]


def inputs_of(workload: Workload) -> dict[str, Any]:
    """Return what ``predict`` starts from: dry runs, and what makers publish of the machine."""
    space, machine, model = workload.space(), workload.machine, workload.model

    def request_of(structure: Structure) -> DryRunRequest:
        config = space.config(space.candidate(structure, 0))
        for key in ("train_batch_size", "train_micro_batch_size_per_gpu"):
            config.pop(key, None)
        shape = {
            "num_layers": model.num_layers,
            "width": model.width,
            "vocabulary": model.vocabulary,
            "sequence_length": model.sequence,
            "checkpoints": model.recomputes,
        }
        return DryRunRequest(
            workload="model_workload:ModelWorkload",
            options={
                "model": "gpt_model:scored_model" if model.keeps_scores else "gpt_model:model",
                "batch": "gpt_model:batch",
                "config": config,
                "shape": shape,
            },
            world_size=machine.num_ranks,
            module_paths=(str(_ROOT / "benchmarks"), str(_ROOT / "tests" / "programs")),
        )

    groups = ConfigGroups(space)
    found = trace_space(groups, request_of, deadline_s=_DEADLINE_S).inputs(groups)
    device = DEVICES["a100" if machine.flops_per_s > 200e12 else "v100"]
    network = machine.network_bytes_per_s / machine.ranks_per_node if machine.num_nodes > 1 else 50e9
    nominal = nominal_machine(device, machine.num_ranks, network_bytes_per_s=network)
    return dataclasses.replace(found, capacity_bytes=machine.device_bytes, machine=nominal).to_json()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--workloads", type=int, nargs="+", default=list(range(len(WORKLOADS))))
    args = parser.parse_args()
    args.directory.mkdir(parents=True, exist_ok=True)
    for number in args.workloads:
        path = args.directory / f"{number}-fixed.json"
        if path.exists():
            continue
        found = inputs_of(WORKLOADS[number])
        path.write_text(json.dumps(found, indent=1), encoding="utf-8")
        print(f"{path}: {len(found['runs'])} runs, {len(found['failures'])} failures", file=sys.stderr)


if __name__ == "__main__":
    main()
