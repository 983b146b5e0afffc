"""Bad configurations and the message of ``dstrial check`` about each."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dstrial.config import load_experiment
from dstrial.errors import ConfigError

EXPERIMENT = """\
name: test
entrypoint: model_def:MyTrial
hyperparameters:
  deepspeed_config: ds.json
searcher:
  name: single
  metric: loss
  max_length: {batches: 10}
"""

MODEL_DEF = """\
class MyTrial:
    pass
"""

DEEPSPEED = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}}


NOT_IN_0_19_0 = frozenset(
    {
        "removed optimizer",
        "parameter that Muon ignores",
        "unknown top-level key",
        "removed section, switched off",
        "removed ZeRO key",
        "bucket size of zero",
        "no gradient norm with the default clipping",
    }
)
"""Mistakes that are none in DeepSpeed 0.19.0, or are told with other words."""


@dataclasses.dataclass(frozen=True)
class BadConfig:
    """One mistake and fragments of the sentence about it."""

    mistake: str
    fragments: tuple[str, ...]
    deepspeed: Mapping[str, Any] | str | None = None
    experiment: str = EXPERIMENT
    slots: int = 1
    keys: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # changed in DeepSpeed's JSON
    says: str = ""  # what DeepSpeed itself says, late; or "accepted", where it trains something else


def ds(
    mistake: str, *fragments: str, slots: int = 1, experiment: str = EXPERIMENT, says: str = "", **keys: Any
) -> BadConfig:
    """Change DeepSpeed's JSON; a key that is None is removed."""
    config = {key: value for key, value in {**DEEPSPEED, **keys}.items() if value is not None}
    return BadConfig(mistake, fragments, config, experiment, slots, keys, says)


def ds_text(mistake: str, text: str, *fragments: str) -> BadConfig:
    """Give DeepSpeed's JSON as text."""
    return BadConfig(mistake, fragments, text)


def exp(mistake: str, old: str, new: str, *fragments: str) -> BadConfig:
    """Change the text of the experiment config."""
    assert old in EXPERIMENT, old
    return BadConfig(mistake, fragments, experiment=EXPERIMENT.replace(old, new))


def zero(stage: int, **keys: Any) -> dict[str, Any]:
    return {"stage": stage, **keys}


CPU = {"device": "cpu"}
PIPELINE = EXPERIMENT + "data: {dstrial: {pipeline_stages: 2}}\nresources: {slots_per_trial: 2}\n"

BAD_CONFIGS: tuple[BadConfig, ...] = (
    # DeepSpeed: keys and types
    ds(
        "unknown top-level key",
        "ds.json:9: zero_optimisation is not a key of DeepSpeed 0.19.8",
        "Write zero_optimization instead; DeepSpeed would ignore it silently.",
        zero_optimisation={"stage": 2},
        says="accepted",
    ),
    ds(
        "unknown key in a section",
        "ds.json:11: zero_optimization.offload_optimiser is not a key of zero_optimization",
        "Write offload_optimizer instead.",
        zero_optimization={"stage": 2, "offload_optimiser": CPU},
        says="Extra inputs are not permitted",
    ),
    ds(
        "unknown key that DeepSpeed ignores",
        "ds.json:10: activation_checkpointing.partitioned_activations",
        "Write partition_activations instead; DeepSpeed would ignore it silently.",
        activation_checkpointing={"partitioned_activations": True},
        says="accepted",
    ),
    ds(
        "removed section, switched off",
        "ds.json:9: amp is",
        "that DeepSpeed 0.19.8 has removed",
        amp={"enabled": False},
        says="has been removed",
    ),
    ds(
        "removed ZeRO key",
        "zero_optimization.mics_shard_size is 8, a setting",
        zero_optimization=zero(3, mics_shard_size=8),
        says="has been removed",
    ),
    ds(
        "stage out of range",
        "ds.json:10: zero_optimization.stage is 4; expected one of 0, 1, 2, 3.",
        zero_optimization=zero(4),
        says="Input should be 0, 1, 2",
    ),
    ds("section that is no mapping", "ds.json:9: fp16 is true; expected a mapping.", fp16=True),
    ds(
        "quoted number",
        'ds.json:2: train_micro_batch_size_per_gpu is "4"; expected an integer of at least 1, or "auto". Write 4 without quotes.',
        train_micro_batch_size_per_gpu="4",
    ),
    ds(
        "bucket size of zero",
        "zero_optimization.reduce_bucket_size is 0; expected an integer above 0.",
        zero_optimization=zero(1, reduce_bucket_size=0),
    ),
    ds(
        "unknown communication type",
        'communication_data_type is "fp8"; expected one of "fp16", "bf16", "fp32". Set it to one of these.',
        communication_data_type="fp8",
    ),
    ds(
        '"auto" that nobody fills in',
        'ds.json:9: gradient_clipping is "auto", which nothing fills in',
        gradient_clipping="auto",
    ),
    ds_text(
        "key given twice",
        '{\n  "train_batch_size": 4,\n  "fp16": {"enabled": true},\n  "train_batch_size": 8\n}\n',
        "ds.json:4: train_batch_size is given twice (first on line 2)",
    ),
    ds_text(
        "comma after the last element",
        '{\n  "train_batch_size": 4,\n}\n',
        "the text from column",
        "is not JSON (",
    ),
    ds_text(
        "a list instead of an object",
        "[1]",
        "deepspeed_config is a file that holds [1]; expected a JSON object",
    ),
    # DeepSpeed: batch equation
    ds(
        "batch sizes that contradict each other",
        "ds.json:9: train_batch_size is 64, but 4 (train_micro_batch_size_per_gpu) x 2",
        "x 4 (data-parallel replicas) = 32",
        "Set train_batch_size to 32, or gradient_accumulation_steps to 4, or train_micro_batch_size_per_gpu to 8.",
        train_batch_size=64,
        gradient_accumulation_steps=2,
        slots=4,
        says="Check batch related parameters",
    ),
    ds(
        "batch that replicas do not divide",
        "train_batch_size is 32 = 5 (train_micro_batch_size_per_gpu) x accumulation steps x 2",
        "Set train_batch_size to 30 or 40, or train_micro_batch_size_per_gpu to 4.",
        train_batch_size=32,
        train_micro_batch_size_per_gpu=5,
        slots=2,
        says="Check batch related parameters",
    ),
    ds(
        "only the accumulation steps",
        "train_micro_batch_size_per_gpu is not given (only gradient_accumulation_steps is given)",
        train_micro_batch_size_per_gpu=None,
        gradient_accumulation_steps=4,
        says="needs to be provided",
    ),
    ds(
        "negative micro batch",
        "train_micro_batch_size_per_gpu is -1; expected an integer of at least 1",
        train_micro_batch_size_per_gpu=-1,
    ),
    # DeepSpeed: impossible pairs
    ds(
        "pipeline with ZeRO 2",
        "ds.json:10: zero_optimization.stage is 2; expected 0 or 1 with a PipelineModule.",
        zero_optimization=zero(2),
        experiment=PIPELINE,
        slots=2,
    ),
    ds(
        "fp16 with bf16",
        "bf16.enabled is true; expected false, because fp16.enabled is true",
        fp16={"enabled": True},
        bf16={"enabled": True},
        says="cannot be simultaneously enabled",
    ),
    ds(
        "fp16 and SGD without ZeRO",
        "zero_optimization.stage is 0 (DeepSpeed's default); expected 1, 2 or 3 with fp16 and SGD.",
        "divides gradients by a loss scale by which it has not multiplied the loss",
        fp16={"enabled": True},
        optimizer={"type": "SGD", "params": {"lr": 0.1}},
        zero_optimization=None,
    ),
    ds(
        "parameter offload below stage 3",
        'zero_optimization.offload_param.device is "cpu"; expected "none" in ZeRO stage 2',
        "DeepSpeed would ignore it silently.",
        zero_optimization=zero(2, offload_param=CPU),
        says="accepted",
    ),
    ds(
        "optimizer offload in stage 0",
        'offload_optimizer.device is "cpu"; expected "none" in ZeRO stage 0.',
        zero_optimization=zero(0, offload_optimizer=CPU),
    ),
    ds(
        "NVMe offload in stage 2",
        'offload_optimizer.device is "nvme"; expected "cpu" in ZeRO stage 2',
        zero_optimization=zero(2, offload_optimizer={"device": "nvme", "nvme_path": "/nvme"}),
        says="accepted",
    ),
    ds(
        "NVMe offload without a path",
        "offload_optimizer.nvme_path is null (DeepSpeed's default); expected a directory",
        zero_optimization=zero(3, offload_optimizer={"device": "nvme"}),
    ),
    ds(
        "partial offload in stage 2",
        "offload_optimizer.ratio is 0.5; expected 1.0",
        zero_optimization=zero(2, offload_optimizer={**CPU, "ratio": 0.5}),
        says="only supported for ZeRO Stage 3",
    ),
    ds(
        "super offload in stage 2",
        "super_offload is true; expected false in ZeRO stage 2",
        zero_optimization=zero(2, offload_optimizer={**CPU, "super_offload": True}),
        says="accepted",
    ),
    ds(
        "no gradient norm with the default clipping",
        "gradient_clipping is 1.0 (DeepSpeed's default); expected 0 with compute_grad_norm false",
        zero_optimization=zero(1, compute_grad_norm=False),
        says="requires gradient_clipping=0",
    ),
    ds(
        "no gradient norm in stage 3",
        "compute_grad_norm is false; expected true outside ZeRO stages 1 and 2",
        gradient_clipping=0.0,
        zero_optimization=zero(3, compute_grad_norm=False),
        says="only with ZeRO Stage 1 or 2",
    ),
    ds(
        "summed gradients in stage 3",
        'gradient_allreduce_op is "sum"; expected "mean" with ZeRO stage 3',
        gradient_allreduce_op="sum",
        zero_optimization=zero(3),
        says="not supported with ZeRO stage 3",
    ),
    ds(
        "prescaled gradients in stage 2",
        "prescale_gradients is true; expected false in ZeRO stage 2",
        prescale_gradients=True,
        zero_optimization=zero(2),
        says="pre-scale gradients is not yet supported",
    ),
    ds(
        "predivided gradients in stage 2",
        "gradient_predivide_factor is 2.0; expected 1",
        gradient_predivide_factor=2.0,
        zero_optimization=zero(2),
        says="gradient_predivide_factor != 1.0 is not yet supported",
    ),
    ds(
        "odd gather bucket",
        "allgather_bucket_size is 5; expected an even number in ZeRO stage 1. Set it to 6.",
        zero_optimization=zero(1, allgather_bucket_size=5),
        says="must be a multiple of",
    ),
    ds(
        "old stage 1",
        "legacy_stage1 is true; expected false",
        zero_optimization=zero(1, legacy_stage1=True),
        says="deprecated version of ZeRO Stage 1",
    ),
    ds(
        "bf16 states without bf16 master weights",
        "bf16.bf16_optimizer_states is true; expected false",
        bf16={"enabled": True, "bf16_optimizer_states": True},
        zero_optimization=zero(1),
        says="requires bf16_master_weights_and_grads",
    ),
    ds(
        "bf16 master weights in stage 0",
        "bf16_master_weights_and_grads is true; expected false in ZeRO stage 0",
        bf16={"enabled": True, "bf16_master_weights_and_grads": True},
        says="only supported with ZeRO Stage",
    ),
    ds(
        "parameter type of another mode",
        'data_types.param_dtype is "fp16"; expected "bf16"',
        bf16={"enabled": True},
        data_types={"param_dtype": "fp16"},
        says="conflicts with the",
    ),
    ds(
        "loss scale window of 0",
        "fp16.loss_scale_window is 0; expected an integer of at least 1",
        fp16={"enabled": True, "loss_scale_window": 0},
        says="must be > 0",
    ),
    ds(
        "unmanaged accumulation in a pipeline",
        "managed_gradient_accumulation is false; expected true with a PipelineModule",
        managed_gradient_accumulation=False,
        experiment=PIPELINE,
        slots=2,
    ),
    ds(
        "ZenFlow without offload",
        "zero_optimization.zenflow is",
        "expected absent without ZeRO and CPU offload",
        zero_optimization=zero(2, zenflow={}),
        says="must be used with cpu offload",
    ),
    ds(
        "ZenFlow interval with the auto strategy",
        'zenflow.select_interval is 4; expected "auto" while',
        zero_optimization=zero(2, offload_optimizer=CPU, zenflow={"select_interval": 4}),
    ),
    ds(
        "autotuning switched on",
        "autotuning.enabled is true; expected false in a training run",
        autotuning={"enabled": True},
    ),
    ds(
        "contiguous checkpoints, not partitioned",
        "contiguous_memory_optimization is true; expected false without partition_activations",
        activation_checkpointing={"contiguous_memory_optimization": True, "number_checkpoints": 2},
        says="accepted",
    ),
    ds(
        "tensor parallelism that does not divide",
        "tensor_parallel.autotp_size is 2; expected a divisor of the 3 ranks",
        tensor_parallel={"autotp_size": 2},
        slots=3,
    ),
    ds(
        "sequence parallelism over a device mesh",
        "data_parallel_size is 1; expected not given with sequence_parallel_size",
        sequence_parallel_size=2,
        data_parallel_size=1,
        slots=2,
    ),
    ds(
        "tensor and sequence parallelism",
        "sequence_parallel_size is 2; expected 1 with tensor_parallel.autotp_size",
        tensor_parallel={"autotp_size": 2},
        sequence_parallel_size=2,
        slots=4,
    ),
    ds(
        "two offloads of DeepCompile",
        "compile.offload_opt_states is true; expected false, because compile.offload_activation",
        compile={"deepcompile": True, "offload_activation": True, "offload_opt_states": True},
        zero_optimization=zero(1),
    ),
    # DeepSpeed: optimizer and scheduler
    ds("misspelt optimizer", 'optimizer.type is "AdmaW"', 'Set it to "adamw".', optimizer={"type": "AdmaW"}),
    ds(
        "lower-case torch optimizer",
        'optimizer.type is "sgd"',
        'Set it to "SGD".',
        optimizer={"type": "sgd", "params": {"lr": 0.1}},
        says="is not a supported DeepSpeed Optimizer",
    ),
    ds(
        "removed optimizer",
        'optimizer.type is "OneBitAdam", which this release of DeepSpeed has removed; expected adam, adamw',
        'Set it to "AdamW"',
        optimizer={"type": "OneBitAdam", "params": {"lr": 0.1}},
    ),
    ds(
        "quoted learning rate",
        'optimizer.params.lr is "1e-3"; expected a number of at least 0. Write 0.001 without quotes.',
        optimizer={"type": "AdamW", "params": {"lr": "1e-3"}},
    ),
    ds(
        "negative learning rate",
        "optimizer.params.lr is -1; expected a number of at least 0.",
        optimizer={"type": "AdamW", "params": {"lr": -1}},
    ),
    ds(
        "one beta",
        "optimizer.params.betas is [0.9]; expected two numbers of at least 0 and below 1. Write [0.9, 0.999]",
        optimizer={"type": "AdamW", "params": {"betas": [0.9]}},
    ),
    ds(
        "parameter that Muon ignores",
        "optimizer.params.muonlr is not a parameter of Muon; expected one of adam_lr",
        "Write muon_lr instead.",
        optimizer={"type": "Muon", "params": {"muonlr": 0.1}},
    ),
    ds(
        "warm-up of no steps",
        "scheduler.params.warmup_num_steps is 0; expected an integer of at least 1.",
        scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 0}},
    ),
    ds(
        "warm-up of a number with an exponent",
        "scheduler.params.warmup_num_steps is 1000.0; expected an integer. Write 1000, without exponent",
        scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 1e3}},
    ),
    ds(
        "misspelt optimizer parameter",
        "optimizer.params.weight_decy is not a parameter of AdamW",
        "Write weight_decay instead.",
        optimizer={"type": "AdamW", "params": {"weight_decy": 0.1}},
    ),
    ds(
        "clipping as an optimizer parameter",
        "optimizer.params.max_grad_norm is 1.0; expected no such parameter. Use the top-level key gradient_clipping.",
        optimizer={"type": "AdamW", "params": {"max_grad_norm": 1.0}},
        says="is not supported as an optimizer parameter",
    ),
    ds(
        "optimizer that ZeRO is not tested with",
        'optimizer.type is "SGD"; expected an optimizer that ZeRO is tested with',
        optimizer={"type": "SGD", "params": {"lr": 0.1}},
        zero_optimization=zero(1),
        says="untested ZeRO Optimizer",
    ),
    ds(
        "Muon in stage 3",
        "zero_optimization.reduce_scatter is true (DeepSpeed's default); expected false with Muon",
        optimizer={"type": "Muon", "params": {"lr": 0.1}},
        zero_optimization=zero(3),
    ),
    ds(
        "scheduler without its length",
        "scheduler.params.total_num_steps is not given",
        scheduler={"type": "WarmupDecayLR", "params": {}},
        says="missing 1 required positional argument",
    ),
    ds(
        "misspelt scheduler",
        'scheduler.type is "WarmUpLr"',
        'Set it to "WarmupLR".',
        scheduler={"type": "WarmUpLr", "params": {}},
        says="does not recognize LR scheduler",
    ),
    # Experiment config
    exp(
        "misspelt field",
        "name: test",
        "nmae: test",
        "exp.yaml:1: nmae is not a key of the experiment config",
        "Write name instead.",
    ),
    exp(
        "misspelt searcher field",
        "metric: loss",
        "metrc: loss",
        "exp.yaml:7: searcher.metrc is not a key of searcher",
        "exp.yaml:5: searcher.metric is not given",
    ),
    exp(
        "no searcher",
        "searcher:\n  name: single\n  metric: loss\n  max_length: {batches: 10}\n",
        "",
        "searcher is not given; expected a mapping with name and metric",
    ),
    exp(
        "searcher that does not exist",
        "name: single",
        "name: asha",
        'exp.yaml:6: searcher.name is "asha"',
        "Set it to async_halving.",
    ),
    exp(
        "searcher that has ended",
        "name: single",
        "name: adaptive_simple",
        "which Determined has ended",
        "Set it to adaptive_asha",
    ),
    exp(
        "random search without trials",
        "name: single",
        "name: random",
        "searcher.max_trials is not given; expected an integer of at least 1 for random",
    ),
    exp(
        "length in an unknown unit",
        "{batches: 10}",
        "{steps: 10}",
        'exp.yaml:8: searcher.max_length is {"steps": 10}; expected a number of batches',
    ),
    exp(
        "policy that does not exist",
        "name: test",
        "checkpoint_policy: last",
        'exp.yaml:1: checkpoint_policy is "last"; expected one of "best", "all", "none".',
    ),
    exp(
        "period without a unit",
        "name: test",
        "min_validation_period: 100",
        "exp.yaml:1: min_validation_period is 100; expected one of {batches: n}, {epochs: n}, {records: n}",
    ),
    exp(
        "negative period",
        "name: test",
        "min_checkpoint_period: {batches: -1}",
        'min_checkpoint_period is {"batches": -1}; expected one of {batches: n}',
    ),
    exp(
        "slots that are no number",
        "name: test",
        "resources: {slots: two}",
        'resources.slots is "two"; expected an integer',
        "Write a value of that type.",
    ),
    exp(
        "negative slots",
        "name: test",
        "resources: {slots_per_trial: -1}",
        "resources.slots_per_trial is -1; expected an integer of at least 0",
    ),
    exp(
        "slots that stages do not divide",
        "name: test",
        "data: {dstrial: {pipeline_stages: 2}}\nresources: {slots_per_trial: 3}",
        "exp.yaml:2: resources.slots_per_trial is 3; expected a multiple of 2",
        "Use 2 or 4 slots.",
    ),
    exp(
        "misspelt key of data.dstrial",
        "name: test",
        "data: {dstrial: {pipeline_stage: 2}}",
        "data.dstrial.pipeline_stage is not a key of data.dstrial",
        "Write pipeline_stages instead.",
    ),
    exp(
        "environment variable without a value",
        "name: test",
        "environment: {environment_variables: [OMP_NUM_THREADS]}",
        'environment.environment_variables[0] is "OMP_NUM_THREADS"; expected NAME=value',
    ),
    exp(
        "reporting period of zero",
        "name: test",
        "scheduling_unit: 0",
        "scheduling_unit is 0; expected an integer of at least 1",
    ),
    exp(
        "seed below zero",
        "name: test",
        "reproducibility: {experiment_seed: -1}",
        "experiment_seed is -1; expected an integer of at least 0 and of at most 4294967295",
    ),
    exp(
        "relative checkpoint directory",
        "name: test",
        "checkpoint_storage: {type: shared_fs, host_path: ckpt}",
        'checkpoint_storage.host_path is "ckpt"; expected an absolute path',
    ),
    exp(
        "a storage path that leads out of the storage",
        "name: test",
        "checkpoint_storage: {type: shared_fs, host_path: /data, storage_path: a/../../etc}",
        'checkpoint_storage.storage_path is "a/../../etc"; expected a directory below host_path (/data)',
    ),
    exp(
        "a storage path beside the storage, under a name that begins alike",
        "name: test",
        "checkpoint_storage: {type: shared_fs, host_path: /data, storage_path: /data-2/mine}",
        'checkpoint_storage.storage_path is "/data-2/mine"; expected a directory below host_path (/data)',
    ),
    exp(
        "a prefix that leads out of the bucket's part",
        "name: test",
        "checkpoint_storage: {type: s3, bucket: b, prefix: mine/../theirs}",
        'checkpoint_storage.prefix is "mine/../theirs"; expected a prefix without ..',
    ),
    exp(
        "two ways to log in at Azure",
        "name: test",
        "checkpoint_storage: {type: azure, container: c, connection_string: s, credential: k}",
        "checkpoint_storage.connection_string is given with credential; expected either connection_string",
    ),
    exp(
        "no way to log in at Azure",
        "name: test",
        "checkpoint_storage: {type: azure, container: c}",
        "checkpoint_storage.account_url is not given; expected account_url, or connection_string",
    ),
    exp(
        "a length of nothing",
        "max_length: {batches: 10}",
        "max_length: {batches: 0}",
        "searcher.max_length is",
        "with n of at least 1",
    ),
    exp(
        "a search space for one trial",
        "  deepspeed_config: ds.json",
        "  deepspeed_config: ds.json\n  lr: {type: double, minval: 0.0, maxval: 1.0}",
        "exp.yaml:5: hyperparameters.lr is a search space (double); expected one value",
        "Pass --config hyperparameters.lr=0.5,",
    ),
    exp(
        "range upside down",
        "  deepspeed_config: ds.json",
        "  deepspeed_config: ds.json\n  lr: {type: double, minval: 1.0, maxval: 0.0}",
        "hyperparameters.lr.minval is 1.0; expected less than maxval (0.0)",
    ),
    exp(
        "kind of hyperparameter that does not exist",
        "  deepspeed_config: ds.json",
        "  deepspeed_config: ds.json\n  lr: {type: float, minval: 0, maxval: 1}",
        'hyperparameters.lr.type is "float"; expected one of const, int, double, log, categorical',
    ),
    exp(
        "DeepSpeed file that does not exist",
        "ds.json",
        "dsconfig.json",
        'exp.yaml:4: hyperparameters.deepspeed_config is "dsconfig.json"',
        "(which has: ds.json).",
    ),
    exp(
        "class that does not exist",
        "MyTrial",
        "MyTrail",
        'exp.yaml:2: entrypoint is "model_def:MyTrail"',
        "has no MyTrail",
        "Write model_def:MyTrial.",
    ),
    exp(
        "module that does not exist",
        "model_def:",
        "modeldef:",
        "modeldef.py does not exist",
        "Write model_def:MyTrial.",
    ),
    exp(
        "script that does not exist",
        "model_def:MyTrial",
        "python3 train.py",
        "entrypoint is train.py, which is not in",
    ),
    exp(
        "key given twice",
        "name: test",
        "name: test\nname: other",
        "exp.yaml:2: name is given twice (first on line 1)",
    ),
    exp("broken YAML", "name: test", "name: [test", "the text is not YAML ("),
)


def write(bad: BadConfig, directory: Path) -> tuple[Path, Path]:
    """Write the experiment; return the paths of its config and of its context directory."""
    deepspeed = bad.deepspeed if bad.deepspeed is not None else DEEPSPEED
    text = deepspeed if isinstance(deepspeed, str) else json.dumps(deepspeed, indent=2)
    (directory / "ds.json").write_text(text, encoding="utf-8")
    (directory / "exp.yaml").write_text(bad.experiment, encoding="utf-8")
    (directory / "model_def.py").write_text(MODEL_DEF, encoding="utf-8")
    return directory / "exp.yaml", directory


def message(bad: BadConfig, directory: Path) -> str:
    """Return what the check says about one bad config, without the directory's name."""
    path, context_dir = write(bad, directory)
    slots = bad.slots if bad.experiment is EXPERIMENT else None
    try:
        load_experiment(path, context_dir, slots=slots)
    except ConfigError as error:
        return str(error).replace(f"{directory}/", "").replace(str(directory), ".")
    return ""
