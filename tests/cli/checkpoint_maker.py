"""Train one run per layout on two ranks; keep its checkpoints and live weights."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import torch
import yaml

from dstrial.checkpoint.completion_marker import read_marker
from dstrial.local.run_directory import RunDirectory
from dstrial.testing.ranks import run_function

DEFINITIONS = Path(__file__).parent / "checkpointed"
NUM_BATCHES = 3

CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "zero 0": ("WideTrial", 0, {}),
    "zero 2": ("WideTrial", 2, {}),
    "zero 3": ("WideTrial", 3, {}),
    "bf16": ("WideTrial", 1, {"bf16": {"enabled": True}}),
    "two engines": ("TwoEnginesTrial", 1, {}),
    "spread experts": ("SpreadExpertsTrial", 2, {}),
    "whole experts": ("WholeExpertsTrial", 2, {}),
    "pipeline": ("TiedPipelineTrial", 1, {}),
    "loose pipeline": ("LooselyTiedPipelineTrial", 0, {}),
}
"""Name -> trial class, ZeRO stage, additions to the DeepSpeed config.

Pipelines come last, because DeepSpeed keeps their topology for the rest of the process.
"""


@dataclasses.dataclass(frozen=True)
class TrainedRun:
    """The two checkpoints of a run, and its weights per engine after training."""

    run_path: Path
    earlier: Path
    latest: Path
    live: list[dict[str, torch.Tensor]]


def make_checkpoints(scratch: Path) -> dict[str, TrainedRun]:
    runs = {}
    for name, (trial, stage, more) in CASES.items():
        config = _experiment(trial, stage, more)
        path = scratch / f"{name}.yaml"
        path.write_text(yaml.safe_dump(config))
        run_directory = RunDirectory.create(
            scratch / "runs", name=name, context_dir=DEFINITIONS, command=["test"], config=config
        )
        runs[name] = (str(path), str(run_directory.path), str(scratch / f"{name}.live.pt"))
    run_function(_train_all, 2, runs, deadline_s=200)
    made = {}
    for name, (_, run_path, live) in runs.items():
        marks = {
            read_marker(path)["steps_completed"]: path for path in Path(run_path, "checkpoints").iterdir()
        }
        made[name] = TrainedRun(
            Path(run_path), marks[NUM_BATCHES - 1], marks[NUM_BATCHES], torch.load(live, weights_only=True)
        )
    return made


def _experiment(trial: str, stage: int, more: dict[str, Any]) -> dict[str, Any]:
    is_pipeline = "Pipeline" in trial
    return {
        "name": "wide",
        "entrypoint": f"wide_trials:{trial}",
        "hyperparameters": {
            "deepspeed_config": {
                "train_batch_size": 8,
                "train_micro_batch_size_per_gpu": 8 if is_pipeline else 4,
                "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
                "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
                "zero_optimization": {"stage": stage},
                **more,
            }
        },
        "searcher": {
            "name": "single",
            "metric": "validation_loss",
            "max_length": {"batches": NUM_BATCHES},
        },
        "min_checkpoint_period": {"batches": NUM_BATCHES - 1},
        "checkpoint_policy": "none",
        "data": {"dstrial": {"pipeline_stages": 2}} if is_pipeline else {},
    }


def _train_all(runs: dict[str, tuple[str, str, str]]) -> None:
    import deepspeed

    from dstrial.config.experiment_config.config import load_experiment
    from dstrial.ranks.process_group import without_compiled_collectives
    from dstrial.trainer import run_trial

    sys.path.insert(0, str(DEFINITIONS))
    import wide_trials

    with without_compiled_collectives(is_cpu=True):
        deepspeed.init_distributed("gloo")
    for name, (config, run_path, live) in runs.items():
        trial_class = getattr(wide_trials, CASES[name][0])
        experiment = load_experiment(config, DEFINITIONS, slots=2)
        run_trial(trial_class, experiment=experiment, run_dir=run_path)
        states = [_live(engine) for engine in trial_class.last.engines]
        if torch.distributed.get_rank() == 0:
            torch.save(states, live)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _live(engine: Any) -> dict[str, torch.Tensor]:
    """Return rank 0's state_dict with the extra entries of rank 1. Ranks: all."""
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        own = {name: value.detach().clone() for name, value in engine.module.state_dict().items()}
    gathered: list[Any] = [None, None]
    torch.distributed.all_gather_object(gathered, own)
    return {**gathered[1], **gathered[0]}
