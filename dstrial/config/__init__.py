"""Experiment config and DeepSpeed JSON: load, merge, solve the batch, check.

Pure but for reading files: no process is started, and torch, deepspeed and determined are never imported.
"""

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
from dstrial.resume.rules import fitting_slots, resume_problems

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
    # going on from a checkpoint
    "EngineRecord",
    "SavedRun",
    "fitting_slots",
    "keep_batch",
    "resume_problems",
]
