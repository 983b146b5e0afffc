"""Write the table of legal DeepSpeed config keys from the installed DeepSpeed release.

``dstrial check`` must know DeepSpeed's keys without importing DeepSpeed, so a table of each release is committed
(``dstrial/config/deepspeed_table.json``) and a test runs :func:`generate` again and compares.
Sections that DeepSpeed describes with pydantic models are read from the models. All others are
observed: the config is parsed from dictionaries that record which keys DeepSpeed asks for and with
which defaults.

Usage: ``python tools/generate_deepspeed_rules.py`` writes the table of the installed release, the newest one's as
a whole, another one's as its differences from the newest one's.
"""

from __future__ import annotations

import enum
import inspect
import json
import os
import sys
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

TABLE_PATH = Path(__file__).resolve().parent.parent / "dstrial" / "config" / "deepspeed_table.json"

_JSON_TYPES: dict[Any, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "list",
    tuple: "list",
    dict: "mapping",
    type(None): "null",
    Path: "string",
}

_OBSERVED_TYPES: dict[str, list[str]] = {
    "train_batch_size": ["integer"],
    "train_micro_batch_size_per_gpu": ["integer"],
    "gradient_accumulation_steps": ["integer"],
    "steps_per_print": ["integer", "null"],
    "vocabulary_size": ["integer", "null"],
    "gradient_clipping": ["number"],
    "gradient_predivide_factor": ["number"],
    "log_level": ["string", "null"],
    "datastates_ckpt": ["mapping", "boolean", "null"],
    "allgather_size": ["number"],
    "optimizer.type": ["string"],
    "optimizer.params": ["mapping"],
    "optimizer.legacy_fusion": ["boolean"],
    "scheduler.type": ["string", "null"],
    "scheduler.params": ["mapping"],
    "activation_checkpointing.number_checkpoints": ["integer", "null"],
    "flops_profiler.recompute_fwd_factor": ["number"],
    "flops_profiler.output_file": ["string", "null"],
    "torch_autocast.lower_precision_safe_modules": ["list", "null"],
    "data_types.keep_in_fp32_modules": ["list", "string"],
    "checkpoint.writer": ["mapping", "null"],
    "checkpoint.writer.io_buffer_size": ["number"],
    "pipeline.stages": ["integer", "string"],
    "pipeline.use_reentrant": ["boolean", "null"],
    "aio": ["mapping", "null"],
    "expert_parallel.top_k": ["integer", "string"],
    "expert_parallel.routed_scaling_factor": ["number", "string"],
}
"""Types of keys whose default says nothing (None) or too little about what DeepSpeed accepts."""

_ENUMS: dict[str, list[str]] = {
    "communication_data_type": ["fp16", "bf16", "fp32"],
    "seq_parallel_communication_data_type": ["fp16", "bf16", "fp32"],
    "gradient_allreduce_op": ["mean", "sum"],
    "checkpoint.tag_validation": ["warn", "ignore", "fail"],
    "checkpoint.writer.type": ["mock", "python", "fast"],
    "checkpoint.writer.data_parallel": ["replica", "socket", "machine"],
}
"""Values that DeepSpeed compares after changing the case of what the user wrote."""

_MINIMUM = {"train_batch_size": 1, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}

_READ_ELSEWHERE: dict[str, dict[str, Any]] = {
    "sequence_parallel_size": {"types": ["integer"], "default": 1, "minimum": 1},
    "data_parallel_size": {"types": ["integer", "null"], "default": None, "minimum": 1},
}
"""Top-level keys read only with several ranks (``deepspeed/__init__.py``, ``runtime/config.py``)."""

_DTYPE_KEYS = (
    "torch_autocast.dtype",
    "data_types.grad_accum_dtype",
    "data_types.param_dtype",
    "data_types.buffer_dtype",
)

_OPEN_SECTIONS = (
    "data_efficiency.data_sampling",
    "data_efficiency.data_routing",
    "datastates_ckpt",
    "autotuning",
)
"""Sections whose inside is free-form or belongs to another tool, and is therefore not checked."""


class _Recorder(dict[str, Any]):
    """A mapping that remembers which keys were asked for and with which default."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: dict[str, Any] = {}

    def get(self, key: str, default: Any = None) -> Any:
        self.seen.setdefault(key, default)
        if self.seen[key] is None:
            self.seen[key] = default
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.seen.setdefault(key, None)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.seen.setdefault(str(key), None)
        return super().__contains__(key)

    def keys(self) -> Any:
        return _RecordedKeys(self)


class _RecordedKeys:
    """Key view whose membership test is recorded too."""

    def __init__(self, owner: _Recorder) -> None:
        self._owner = owner

    def __contains__(self, key: object) -> bool:
        return key in self._owner

    def __iter__(self) -> Iterator[str]:
        return dict.__iter__(self._owner)


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) > 1e3 else value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return None


def _annotation(annotation: Any) -> dict[str, Any]:
    """Describe a pydantic annotation as types, legal values and a nested section."""
    from pydantic import BaseModel

    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        merged: dict[str, Any] = {"types": []}
        for argument in typing.get_args(annotation):
            part = _annotation(argument)
            merged["types"] += [name for name in part.pop("types") if name not in merged["types"]]
            merged.update(part)
        return merged
    if origin is typing.Literal:
        return {"types": ["string"], "enum": list(typing.get_args(annotation))}
    if origin is not None:
        return {"types": [_JSON_TYPES.get(origin, "any")]}
    if inspect.isclass(annotation):
        if issubclass(annotation, BaseModel):
            return {"types": ["mapping"], "section": _model_section(annotation)}
        if issubclass(annotation, enum.Enum):
            values = sorted({member.value for member in annotation})
            return {"types": [_JSON_TYPES[type(values[0])]], "enum": values}
    return {"types": [_JSON_TYPES.get(annotation, "any")]}


def _model_section(model: Any) -> dict[str, Any]:
    """Describe a pydantic config model: its keys, types, bounds and defaults."""
    keys: dict[str, Any] = {}
    for field_name, field in model.model_fields.items():
        if field.exclude:
            continue
        rule = _annotation(field.annotation)
        extra = field.json_schema_extra or {}
        if extra.get("deprecated"):
            rule["replaced_by"] = extra.get("new_param", "")
        for constraint in field.metadata:
            for attribute, name in (
                ("gt", "exclusive_minimum"),
                ("ge", "minimum"),
                ("lt", "exclusive_maximum"),
                ("le", "maximum"),
            ):
                if getattr(constraint, attribute, None) is not None:
                    rule[name] = getattr(constraint, attribute)
        if "section" not in rule:
            rule["default"] = _plain(field.get_default(call_default_factory=True))
        elif "null" in rule["types"]:
            rule["default"] = None
        name = field.alias or field_name
        if field.alias:
            rule["also"] = [field_name]
        keys[name] = rule
    return {"strict": True, "keys": keys}


def _observed_rule(path: str, default: Any) -> dict[str, Any]:
    """Describe a key that DeepSpeed was seen to ask for."""
    rule: dict[str, Any] = {"default": _plain(default)}
    if path in _OBSERVED_TYPES:
        rule["types"] = _OBSERVED_TYPES[path]
    elif path in _ENUMS:
        rule["types"] = ["string"] if default is not None else ["string", "null"]
    elif default is None:
        rule["types"] = ["any"]
    else:
        rule["types"] = [_JSON_TYPES.get(type(default), "any")]
    if path in _ENUMS:
        rule["enum"] = _ENUMS[path]
        rule["ignores_case"] = True
    if path in _MINIMUM:
        rule["minimum"] = _MINIMUM[path]
    return rule


def _observed_section(path: str, recorder: _Recorder) -> dict[str, Any]:
    keys = {}
    for key, default in recorder.seen.items():
        inner = f"{path}.{key}" if path else key
        value = dict.get(recorder, key)
        rule = _observed_rule(inner, default)
        if isinstance(value, _Recorder):
            rule["types"] = [*(["null"] if "null" in rule["types"] else []), "mapping"]
            rule.pop("default")
            if inner not in _OPEN_SECTIONS:
                rule["section"] = _observed_section(inner, value)
        keys[key] = rule
    return {"strict": False, "keys": keys}


def _signature(function: Callable[..., Any]) -> dict[str, Any]:
    """List the arguments of an optimizer or scheduler, and those without a default."""
    arguments = [
        argument
        for argument in inspect.signature(function).parameters.values()
        if argument.name not in ("self", "params", "model_params", "optimizer")
        and argument.kind not in (argument.VAR_KEYWORD, argument.VAR_POSITIONAL)
    ]
    return {
        "params": sorted(argument.name for argument in arguments),
        "required": sorted(argument.name for argument in arguments if argument.default is argument.empty),
    }


def _optimizers() -> dict[str, Any]:
    """Describe every optimizer type the JSON may name; DeepSpeed's own names are in lower case."""
    import deepspeed.runtime.engine
    import torch
    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from deepspeed.ops.lamb import FusedLamb
    from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
    from deepspeed.runtime import config
    from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS

    adam = [FusedAdam, DeepSpeedCPUAdam, torch.optim.AdamW]
    built_in: dict[str, list[Any] | None] = {
        config.ADAM_OPTIMIZER: adam,
        config.ADAMW_OPTIMIZER: adam,
        config.ADAGRAD_OPTIMIZER: [DeepSpeedCPUAdagrad, torch.optim.Adagrad],
        config.LAMB_OPTIMIZER: [FusedLamb],
        config.LION_OPTIMIZER: [DeepSpeedCPULion, FusedLion],
        config.MUON_OPTIMIZER: None,
        config.MUADAM_OPTIMIZER: None,
        config.MUADAMW_OPTIMIZER: None,
        config.MUSGD_OPTIMIZER: None,
    }
    if set(built_in) != set(config.DEEPSPEED_OPTIMIZERS):
        raise RuntimeError(
            f"DeepSpeed's optimizers are {sorted(config.DEEPSPEED_OPTIMIZERS)}; extend built_in."
        )
    result: dict[str, Any] = {}
    for name, classes in built_in.items():
        tested = name == config.MUON_OPTIMIZER or any(
            cls in ZERO_SUPPORTED_OPTIMIZERS for cls in classes or ()
        )
        result[name] = {"zero_tested": tested}
        if classes is not None:
            accepted = {parameter for cls in classes for parameter in _signature(cls)["params"]}
            if classes is adam:
                accepted |= {config.TORCH_ADAM_PARAM, config.ADAM_W_MODE, "fp32_optimizer_states"}
            result[name]["params"] = sorted(accepted)
    engine = deepspeed.runtime.engine.DeepSpeedEngine
    if hasattr(engine, "_MUON_HALF_KEYS"):  # since 0.19.8; Muon ignores all others
        by_engine = {config.TORCH_ADAM_PARAM, config.ADAM_W_MODE, "fp32_optimizer_states", "foreach"}
        halves = {*engine._MUON_HALF_KEYS, *engine._ADAM_HALF_KEYS, "muon_lr", "adam_lr"}
        result[config.MUON_OPTIMIZER]["params"] = sorted(halves | by_engine)
    base = torch.optim.Optimizer
    for name, cls in vars(torch.optim).items():
        is_optimizer = inspect.isclass(cls) and issubclass(cls, base) and cls is not base
        if is_optimizer and name.lower() not in built_in:
            result[name] = {
                "zero_tested": cls in ZERO_SUPPORTED_OPTIMIZERS,
                "params": _signature(cls)["params"],
            }
    return dict(sorted(result.items()))


def _schedulers() -> dict[str, Any]:
    """Describe every scheduler type the JSON may name: DeepSpeed's own, then PyTorch's."""
    import torch
    from deepspeed.runtime import lr_schedules

    result = {name: _signature(getattr(lr_schedules, name)) for name in lr_schedules.VALID_LR_SCHEDULES}
    for name, cls in vars(torch.optim.lr_scheduler).items():
        base = torch.optim.lr_scheduler.LRScheduler
        if inspect.isclass(cls) and issubclass(cls, base) and cls is not base and not name.startswith("_"):
            result.setdefault(name, _signature(cls))
    return dict(sorted(result.items()))


def generate() -> dict[str, Any]:
    """Describe the config of the installed DeepSpeed."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed
    import torch
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.compile.config import CompileConfig
    from deepspeed.inference.config import WeightQuantConfig
    from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
    from deepspeed.runtime import config
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

    models = {
        "zero_optimization": DeepSpeedZeroConfig,
        "fp16": DeepSpeedFP16Config,
        "bf16": DeepSpeedBF16Config,
        "bfloat16": DeepSpeedBF16Config,
        "comms_logger": CommsLoggerConfig,
        "tensorboard": TensorBoardConfig,
        "wandb": WandbConfig,
        "csv_monitor": CSVConfig,
        "comet": CometConfig,
        "hybrid_engine": config.HybridEngineConfig,
        "weight_quantization": WeightQuantConfig,
        "compile": CompileConfig,
        "tensor_parallel": TPTrainingConfig,
    }
    sampling = _Recorder()
    recorder = _Recorder(
        train_batch_size=1,
        optimizer=_Recorder(type="Adam", params={}),
        scheduler=_Recorder(type="WarmupLR", params={}),
        torch_autocast=_Recorder(dtype="bf16", lower_precision_safe_modules=[]),
        activation_checkpointing=_Recorder(),
        flops_profiler=_Recorder(),
        autotuning=_Recorder(),
        data_efficiency=_Recorder(data_sampling=sampling, data_routing=_Recorder()),
        checkpoint=_Recorder(parallel_write=_Recorder(), writer=_Recorder()),
        data_types=_Recorder(),
        aio=_Recorder(),
        timers=_Recorder(),
        expert_parallel=_Recorder(enabled=False),
    )
    config.DeepSpeedConfig(recorder)

    root = _observed_section("", recorder)
    keys = root["keys"]
    # 0.19.0 still reads them.
    removed = getattr(config, "_REMOVED_TOP_LEVEL_CONFIG_KEYS", ())
    for name in removed:
        keys.pop(name, None)
    for name, model in models.items():
        if name not in keys:
            raise RuntimeError(
                f"DeepSpeed no longer reads the section {name!r}; remove it from the generator."
            )
        keys[name] = {"types": ["mapping"], "section": _model_section(model)}
    keys["zero_optimization"]["types"] = ["mapping", "boolean"]
    keys["bfloat16"]["replaced_by"] = "bf16"
    keys["timers"]["section"]["keys"]["throughput"] = {
        "types": ["mapping"],
        "section": _model_section(DeepSpeedThroughputTimerConfig),
    }
    pipeline = {
        key: _observed_rule(f"pipeline.{key}", value) for key, value in config.get_pipeline_config({}).items()
    }
    pipeline["use_reentrant"] = _observed_rule("pipeline.use_reentrant", None)
    keys["pipeline"] = {"types": ["mapping"], "section": {"strict": False, "keys": pipeline}}
    keys["allgather_size"] = {
        "types": ["number"],
        "default": None,
        "replaced_by": "zero_optimization.allgather_bucket_size",
    }
    keys["weight_quantization"].update({"types": ["mapping", "null"], "default": None})
    keys.update(_READ_ELSEWHERE)
    keys["optimizer"]["section"]["keys"]["legacy_fusion"]["default"] = config.LEGACY_FUSION_DEFAULT
    dtypes = sorted({str(name) for member in config.DtypeEnum for name in member._all_values[1:]})
    for path in _DTYPE_KEYS:
        section, key = path.split(".")
        if key in keys[section]["section"]["keys"]:
            rule = keys[section]["section"]["keys"][key]
            rule.update({"types": ["string", "null"], "enum": dtypes})
    root["keys"] = dict(sorted(keys.items()))
    return {
        "deepspeed": deepspeed.__version__,
        "torch": torch.__version__.split("+")[0],
        "root": root,
        "optimizers": _optimizers(),
        "schedulers": _schedulers(),
    }


def main() -> int:
    TABLE_PATH.write_text(json.dumps(generate(), indent=1, sort_keys=False) + "\n", encoding="utf-8")
    sys.stdout.write(f"wrote {TABLE_PATH}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
