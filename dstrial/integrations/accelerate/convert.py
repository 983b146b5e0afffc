"""Convert an ``accelerate config`` file into an experiment and a DeepSpeed JSON.

No file access; Accelerate need not be installed. Values of the JSON are not checked; ``dstrial check`` does that.

Source: accelerate 1.15 ``commands/config/config_args.py`` (``ClusterConfig``), ``commands/config/cluster.py`` (questions of
``accelerate config``), ``utils/launch.py`` and ``utils/dataclasses.py:DeepSpeedPlugin`` (effect of each key).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dstrial.config.batch import AUTO, BATCH_KEYS
from dstrial.config.diagnostics import render
from dstrial.config.documents import yaml_text
from dstrial.config.dotted_keys import value_at
from dstrial.errors import ConfigError, ConfigProblem

JSON_NAME, YAML_NAME = "ds_config.json", "experiment.yaml"
MARK = "CHOOSE"
"""Word in comments of the YAML, on each line whose value the user must choose."""

_SECTION = "deepspeed_config"
_DEFAULT_STAGE = 2  # default ZeRO stage of DeepSpeedPlugin, accelerate 1.15
_TOTAL, _MICRO, _STEPS = BATCH_KEYS

# Key of the Accelerate config -> environment variable with the same effect.
_VARIABLES: Mapping[str, str] = {
    "debug": "ACCELERATE_DEBUG_MODE",
    "enable_cpu_affinity": "ACCELERATE_CPU_AFFINITY",
    f"{_SECTION}.zero3_init_flag": "ACCELERATE_DEEPSPEED_ZERO3_INIT",
}
_VARIABLE = "set Accelerate's variable ACCELERATE_{} in environment.environment_variables"
_FILTER = "disable slots with `det slot disable`, or set CUDA_VISIBLE_DEVICES for dstrial up"
_ACTIONS: Mapping[str, str] = {
    f"{_SECTION}.deepspeed_exclusion_filter": _FILTER,
    f"{_SECTION}.deepspeed_inclusion_filter": _FILTER,
    "num_machines": "`dstrial up` serves the slots of one machine; a Determined cluster deals them out over its machines",
    "gpu_ids": "the master deals out slots; CUDA_VISIBLE_DEVICES limits those of dstrial up",
    "fp8_config": _VARIABLE.format("FP8_…"),
    "dynamo_backend": _VARIABLE.format("DYNAMO_BACKEND"),
    "dynamo_config": _VARIABLE.format("DYNAMO_…"),
    f"{_SECTION}.deepspeed_moe_layer_cls_names": _VARIABLE.format("DEEPSPEED_MOE_LAYER_CLS_NAMES"),
    "parallelism_config": "set tensor_parallel or sequence parallelism in DeepSpeed's own JSON",
}
"""Key of the Accelerate config that cannot be converted -> what the user must do instead."""


@dataclasses.dataclass(frozen=True, slots=True)
class Choices:
    """Settings of an experiment that an Accelerate config lacks; the user gives them."""

    entrypoint: str | None  # the training script with its arguments; None if unknown
    micro_batch_size: int | None  # None to use the micro batch size of the script's data loader
    name: str  # of the experiment


@dataclasses.dataclass(frozen=True, slots=True)
class Conversion:
    """The parts of an experiment that :func:`convert` makes of an Accelerate config."""

    choices: Choices
    slots: int  # ranks of the job
    deepspeed: Mapping[str, Any]  # the DeepSpeed JSON
    variables: Mapping[str, str]  # environment variables
    overwrites: Mapping[str, Any]  # hyperparameter `overwrite_deepspeed_args`
    left: Sequence[str]  # a sentence for each setting that is not converted


def is_deepspeed(config: Mapping[str, Any]) -> bool:
    """Return whether an Accelerate config trains with DeepSpeed."""
    return bool(config.get("distributed_type", "DEEPSPEED") == "DEEPSPEED")


def convert(
    config: Mapping[str, Any],
    choices: Choices,
    *,
    label: str,
    deepspeed_file: Mapping[str, Any] | None = None,
) -> Conversion:
    """Convert an Accelerate config into a DeepSpeed JSON and experiment settings.

    Args:
        config: the Accelerate config.
        choices: settings that the Accelerate config lacks.
        label: name of the config file in messages.
        deepspeed_file: content of the file in ``deepspeed_config.deepspeed_config_file``; None if the key is not set.

    Raises:
        ConfigError: the config is for FSDP, Megatron-LM, TPU, Neuron or a hosted service, has the old key ``fp16``, or has
            an invalid section, ZeRO stage, precision or number of processes.
    """
    problems = [ConfigProblem(f"{label}: {key}", repr(got), *rest) for key, got, *rest in _problems(config)]
    if problems:
        raise ConfigError(problems)
    micro, overwrites = choices.micro_batch_size, {}
    if deepspeed_file is not None and is_deepspeed(config):
        deepspeed = dict(deepspeed_file)
        if micro not in (None, deepspeed.get(_MICRO)):
            overwrites = {_MICRO: micro}
    else:
        deepspeed = _deepspeed_json(config, micro)
    slots = max(int(config.get("num_processes") or 1), 1)
    variables = _variables(config, has_file=deepspeed_file is not None)
    return Conversion(choices, slots, deepspeed, variables, overwrites, [*_left(config, deepspeed)])


def _problems(config: Mapping[str, Any]) -> Iterator[tuple[str, Any, str, str]]:
    """Yield (key, value, expected, fix) of each value that cannot be converted."""
    section, slots = config.get(_SECTION) or {}, config.get("num_processes")
    if not isinstance(section, Mapping):
        yield _SECTION, section, "a mapping", "Write its keys below it."
        return
    stage = section.get("zero_stage", _DEFAULT_STAGE)
    if config.get("compute_environment") not in (None, "LOCAL_MACHINE"):
        fix = "Make a file for a machine of your own with `accelerate config`."
        yield "compute_environment", config["compute_environment"], "LOCAL_MACHINE", fix
    if (kind := config.get("distributed_type")) in ("FSDP", "MEGATRON_LM", "XLA", "TPU", "MULTI_NEURON"):
        yield "distributed_type", kind, "DEEPSPEED", "Run `accelerate config` and choose DeepSpeed."
    if slots is not None and (not _is_integer(slots) or (slots < 1 and slots != -1)):
        yield "num_processes", slots, "an integer of at least 1", "Correct it."
    if _precision_of(config) not in ("no", "fp16", "bf16", "fp8"):
        yield "mixed_precision", config["mixed_precision"], "no, fp16, bf16 or fp8", "Correct it."
    if config.get("fp16") is True and "mixed_precision" not in config:
        yield "fp16", True, "mixed_precision; fp16 is the old key", "Write mixed_precision: fp16."
    if is_deepspeed(config) and (not _is_integer(stage) or stage < 0):
        yield f"{_SECTION}.zero_stage", stage, "an integer of at least 0", "Correct it."


def _has_effect(value: Any) -> bool:
    """Return whether a value of the Accelerate config has an effect.

    False, null, "no", "none", "all" and empty values have no effect.
    """
    return value is not False and value not in (None, "", {}, [], "no", "none", "NO", "all")


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _precision_of(config: Mapping[str, Any]) -> str:
    return str(config.get("mixed_precision") or "no").lower()


def _deepspeed_json(config: Mapping[str, Any], micro: int | None) -> dict[str, Any]:
    precision, section = _precision_of(config), config.get(_SECTION) or {}
    stage = section.get("zero_stage", _DEFAULT_STAGE)
    if not is_deepspeed(config):
        # ZeRO stage 0; with fp16 stage 1, because stage 0 has no loss scaling.
        section, stage = {}, 1 if precision == "fp16" else 0
    zero: dict[str, Any] = {"stage": stage}
    for name, minimum in (("offload_optimizer", 1), ("offload_param", 3)):
        device = section.get(f"{name}_device")
        if _has_effect(device) and stage >= minimum:
            zero[name] = {"device": "cpu" if device == "nvme" and stage < 3 else device}
            path = section.get(f"{name}_nvme_path")
            if zero[name]["device"] == "nvme" and path:
                zero[name]["nvme_path"] = str(path)
    if stage == 3 and section.get("zero3_save_16bit_model") is not None:
        zero["stage3_gather_16bit_weights_on_model_save"] = section["zero3_save_16bit_model"] is True
    found: dict[str, Any] = {_TOTAL: AUTO, _MICRO: AUTO} if micro is None else {_MICRO: micro}
    found |= {_STEPS: section.get(_STEPS) or 1, "zero_optimization": zero}
    if section.get("gradient_clipping") not in (None, "", AUTO):
        found["gradient_clipping"] = section["gradient_clipping"]
    if precision == "fp16":
        found["fp16"] = {"enabled": True, "auto_cast": True}
    elif precision != "no":
        found["bf16"] = {"enabled": True}
    return found


def _variables(config: Mapping[str, Any], *, has_file: bool) -> dict[str, str]:
    # Not ACCELERATE_USE_CPU, which disables DeepSpeed.
    found = {"DS_ACCELERATOR": "cpu"} if config.get("use_cpu") is True else {}
    for key, variable in _VARIABLES.items():
        value = value_at(config, key)
        is_unused = key.startswith(_SECTION) and not is_deepspeed(config)
        is_switched_off = value is False and ("." in key)
        if not is_unused and (_has_effect(value) or is_switched_off):
            found[variable] = str(value).lower() if isinstance(value, bool) else str(value)
    if _precision_of(config) == "fp8" and not has_file:
        found["ACCELERATE_MIXED_PRECISION"] = "fp8"
    return found


def _left(config: Mapping[str, Any], deepspeed: Mapping[str, Any]) -> Iterator[str]:
    if not is_deepspeed(config) and config.get(_SECTION):
        yield f"{_SECTION}: accelerate ignores it under distributed_type {config['distributed_type']}"
        config = {**config, _SECTION: {}}
    for key, action in _ACTIONS.items():
        value = value_at(config, key)
        if _has_effect(value) and (key, value) != ("num_machines", 1):
            yield f"{key} {render(value)}: {action}"
    zero = deepspeed.get("zero_optimization") or {}
    for name in ("offload_optimizer", "offload_param"):
        device = value_at(config, f"{_SECTION}.{name}_device")
        if _has_effect(device) and (zero.get(name) or {}).get("device") != device:
            yield f"{_SECTION}.{name}_device {device}: DeepSpeed has no such offload in ZeRO stage {zero.get('stage', 0)}"


_TEMPLATE = """\
# Made of {source} by `dstrial convert accelerate`. Lines marked CHOOSE wait for your decision.
name: {name}
entrypoint: {entrypoint}

hyperparameters:
  # Relative to the directory of the model definition.
  deepspeed_config: {json_name}
{overwrites}
{optimizer}

searcher:
  name: single # CHOOSE: or random, grid, adaptive_asha, async_halving
  metric: validation_loss # CHOOSE: what the script reports; of a Trainer that is eval_loss
  smaller_is_better: true
  max_length:
    batches: 1000 # CHOOSE: how long to train, in optimizer steps

# Of a Trainer --eval_steps and --save_steps count instead of these two.
min_validation_period: {{batches: 100}} # CHOOSE: when the reporter has the script validate
min_checkpoint_period: {{batches: 100}} # CHOOSE: how much a crash may cost

resources:
  slots_per_trial: {slots}
"""


def experiment_yaml(conversion: Conversion, source: str) -> str:
    """Return the experiment config as YAML, with comments.

    The first comment says that the config was converted from the file ``source``.
    """
    choices = conversion.choices
    entrypoint = _scalar(f"python3 -m dstrial.launch {choices.entrypoint or 'train.py'}")
    if choices.entrypoint is None:
        entrypoint += f" # {MARK}: the training script, with its arguments"
    overwrites = ["  overwrite_deepspeed_args: {}"]
    if conversion.overwrites:
        overwrites = ["  overwrite_deepspeed_args:"]
        overwrites += [f"    {key}: {_scalar(value)}" for key, value in conversion.overwrites.items()]
    elif not any(isinstance(conversion.deepspeed.get(key), int) for key in (_TOTAL, _MICRO)):
        overwrites.insert(
            0, f"  # {MARK}: {_MICRO}, that of the script's first loader as long as it is auto."
        )
    optimizer = f"  # {MARK}: nothing, if the script makes its own optimizer; with one in the JSON it takes DummyOptim."
    if "optimizer" in conversion.deepspeed:
        optimizer = (
            "  # The JSON has the optimizer: the script prepares accelerate.utils.DummyOptim in its place."
        )
    text = _TEMPLATE.format(
        source=source,
        name=_scalar(choices.name),
        entrypoint=entrypoint,
        json_name=JSON_NAME,
        overwrites="\n".join(overwrites),
        optimizer=optimizer,
        slots=conversion.slots,
    )
    if conversion.variables:
        lines = [f"    - {_scalar(f'{name}={value}')}" for name, value in conversion.variables.items()]
        text += "\n".join(["", "environment:", "  environment_variables:", *lines, ""])
    return text


def _scalar(value: Any) -> str:
    text = yaml_text([value]).removeprefix("- ").strip()
    return text if "\n" not in text else json.dumps(value, ensure_ascii=False)
