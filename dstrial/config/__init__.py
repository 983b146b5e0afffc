"""Experiment config and DeepSpeed JSON: load, merge, solve the batch, check.

This package only reads files. It starts no process and never imports torch, deepspeed or determined. Names are resolved
lazily, because this package and ``dstrial.resume`` import each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dstrial.lazy_names import lazily

if TYPE_CHECKING:
    from dstrial.config.batch import BatchSolution, resolve_batch, solve_batch
    from dstrial.config.deepspeed_rules.check import CheckResult, ExplainedValue, check_deepspeed, explain
    from dstrial.config.deepspeed_rules.ignored import zero_keys_without_effect
    from dstrial.config.deepspeed_source import DeepSpeedSource
    from dstrial.config.experiment_config.config import ExperimentConfig, experiment_name, load_experiment
    from dstrial.config.merge import merge_deepspeed, overwrite_deepspeed_config
    from dstrial.config.parallel_dims import ParallelDims
    from dstrial.config.schema import Length
    from dstrial.resume.batch import keep_batch
    from dstrial.resume.metadata import EngineRecord, SavedRun
    from dstrial.resume.plan import resumable_slots, resume_problems

__all__ = [
    # experiment config
    "ExperimentConfig",
    "Length",
    "experiment_name",
    "load_experiment",
    # DeepSpeed config
    "CheckResult",
    "DeepSpeedSource",
    "ExplainedValue",
    "ParallelDims",
    "check_deepspeed",
    "explain",
    "merge_deepspeed",
    "overwrite_deepspeed_config",
    "zero_keys_without_effect",
    # batch equation
    "BatchSolution",
    "resolve_batch",
    "solve_batch",
    # resuming from a checkpoint
    "EngineRecord",
    "SavedRun",
    "keep_batch",
    "resumable_slots",
    "resume_problems",
]

_HOMES = {
    "BatchSolution": "dstrial.config.batch",
    "CheckResult": "dstrial.config.deepspeed_rules.check",
    "DeepSpeedSource": "dstrial.config.deepspeed_source",
    "EngineRecord": "dstrial.resume.metadata",
    "ExperimentConfig": "dstrial.config.experiment_config.config",
    "ExplainedValue": "dstrial.config.deepspeed_rules.check",
    "Length": "dstrial.config.schema",
    "ParallelDims": "dstrial.config.parallel_dims",
    "SavedRun": "dstrial.resume.metadata",
    "check_deepspeed": "dstrial.config.deepspeed_rules.check",
    "experiment_name": "dstrial.config.experiment_config.config",
    "explain": "dstrial.config.deepspeed_rules.check",
    "keep_batch": "dstrial.resume.batch",
    "load_experiment": "dstrial.config.experiment_config.config",
    "merge_deepspeed": "dstrial.config.merge",
    "overwrite_deepspeed_config": "dstrial.config.merge",
    "resolve_batch": "dstrial.config.batch",
    "resumable_slots": "dstrial.resume.plan",
    "resume_problems": "dstrial.resume.plan",
    "solve_batch": "dstrial.config.batch",
    "zero_keys_without_effect": "dstrial.config.deepspeed_rules.ignored",
}

__getattr__ = lazily(__name__, _HOMES)
