"""Dry-run the models of the benchmark's workloads, as ``predict`` does with a user's, and keep what it starts from.

Usage::

    python benchmarks/dsat_dry_runs.py DIR [--workloads 0 1 ...] [--batch fixed free]

One file per workload and kind of batch, which ``dsat.py --dry-runs DIR`` reads. The engines are DeepSpeed's own under fake
tensors; nothing of the surfaces' formulas or hidden errors is in these files.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from dsat_workloads import WORKLOADS, Workload

from dstrial.dsat.driver.dry_runs import dry_run_space
from dstrial.dsat.predictor.config_groups import ConfigGroups
from dstrial.dsat.predictor.hardware import DEVICES, nominal_machine
from dstrial.dsat.predictor.profiles import PredictInputs
from dstrial.dsat.space.space import Structure
from dstrial.engine.dryrun.values import DryRunRequest

if TYPE_CHECKING:
    import torch

_DEADLINE_S = 7200.0


def inputs_of(workload: Workload, *, is_free: bool, known: PredictInputs | None = None) -> dict[str, Any]:
    """Return what ``predict`` starts from: dry runs, and what makers publish of the machine.

    Args:
        workload: what is dry-run.
        is_free: whether the global batch is free.
        known: of the other kind of batch; what it has of the same keys is the same, for no batch size is in a dry run.
    """
    space, machine = workload.space(free_batch=is_free), workload.machine
    keys = ConfigGroups(space).representatives()
    if known is not None and keys.keys() <= known.runs.keys():
        runs = {key: known.runs[key] for key in keys}
        return _with_machine(workload, dataclasses.replace(known, runs=runs, failures={}))
    model = workload.model

    def request_of(structure: Structure, is_accumulating: bool) -> DryRunRequest:
        config = space.config(space.candidate(structure, 0))
        for key in ("train_batch_size", "train_micro_batch_size_per_gpu"):
            config.pop(key, None)
        config["gradient_accumulation_steps"] = 4 if is_accumulating else 1
        shape = {
            "num_layers": model.num_layers,
            "width": model.width,
            "vocabulary": model.vocabulary,
            "sequence_length": model.sequence,
            "checkpoints": model.recomputes,
        }
        return DryRunRequest(
            workload="dstrial.engine.dryrun.measure:ModelWorkload",
            shared_options={
                "model": "dsat_dry_runs:scored_model" if model.keeps_scores else "gpt_model:model",
                "batch": "gpt_model:batch",
            },
            options={"shape": shape},
            deepspeed_config=config,
            world_size=machine.num_ranks,
            target="cuda",
            device_bytes=int(machine.device_bytes),
            module_paths=(str(Path(__file__).resolve().parent),),
        )

    return _with_machine(workload, dry_run_space(ConfigGroups(space), request_of, deadline_s=_DEADLINE_S))


def _with_machine(workload: Workload, found: PredictInputs) -> dict[str, Any]:
    """Return inputs with what makers publish of a workload's machine."""
    machine = workload.machine
    device = DEVICES["a100" if machine.flops_per_s > 200e12 else "v100"]
    network = machine.network_bytes_per_s / machine.ranks_per_node if machine.num_nodes > 1 else 50e9
    nominal = nominal_machine(device, machine.num_ranks, network_bytes_per_s=network)
    return dataclasses.replace(found, capacity_bytes=machine.device_bytes, machine=nominal).to_json()


def scored_model(**shape: Any) -> Any:
    """Return a model whose attention keeps its scores, as without a fused kernel."""
    import gpt_model
    from torch import nn

    made = gpt_model.model(**shape)
    for block in made.blocks:
        block.forward = _scored_forward.__get__(block, type(block))
    assert isinstance(made, nn.Module)
    return made


def _scored_forward(block: Any, x: torch.Tensor) -> torch.Tensor:
    from torch.nn import functional

    records, tokens, width = x.shape
    query, key, value = (
        block.qkv(block.norm1(x)).view(records, tokens, 3, block.num_heads, -1).permute(2, 0, 3, 1, 4)
    )
    scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
    attended = functional.dropout(scores.softmax(-1), 0.1) @ value
    x = x + block.project(attended.transpose(1, 2).reshape(records, tokens, width))
    return x + block.down(functional.gelu(block.up(block.norm2(x))))


def main() -> None:
    """Write what is not there yet."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--workloads", type=int, nargs="+", default=list(range(len(WORKLOADS))))
    parser.add_argument("--batch", nargs="+", choices=["fixed", "free"], default=["fixed", "free"])
    args = parser.parse_args()
    args.directory.mkdir(parents=True, exist_ok=True)
    for number, batch in itertools.product(args.workloads, args.batch):
        path = args.directory / f"{number}-{batch}.json"
        if path.exists():
            continue
        began_s = time.monotonic()
        other = args.directory / f"{number}-{'fixed' if batch == 'free' else 'free'}.json"
        known = None
        if other.exists():
            known = PredictInputs.from_json(json.loads(other.read_text(encoding="utf-8")))
        found = inputs_of(WORKLOADS[number], is_free=batch == "free", known=known)
        path.write_text(json.dumps(found, indent=1), encoding="utf-8")
        print(
            f"{path}: {len(found['runs'])} runs, {len(found['failures'])} failures, {time.monotonic() - began_s:.0f} s",
            file=sys.stderr,
        )


if __name__ == "__main__":
    main()
