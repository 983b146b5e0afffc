"""Convert an ``accelerate config`` file into an experiment and a DeepSpeed JSON.

No file access; Accelerate need not be installed. Values of the JSON are not checked; ``dstrial check`` does that.

Source: accelerate 1.15 ``commands/config/config_args.py`` (``ClusterConfig``), ``commands/config/cluster.py`` (questions of
``accelerate config``), ``utils/launch.py`` and ``utils/dataclasses.py:DeepSpeedPlugin`` (effect of each key).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from dstrial.config.batch import AUTO, BATCH_KEYS
from dstrial.config.documents import yaml_text
from dstrial.config.dotted_keys import value_at
from dstrial.errors import ConfigError, ConfigProblem

JSON_NAME, YAML_NAME = "ds_config.json", "experiment.yaml"
MARK = "CHOOSE"
"""Word in comments of the YAML, on each line whose value the user must choose."""

_SECTION = "deepspeed_config"
_SECTIONS = (_SECTION, "dynamo_config", "fp8_config", "parallelism_config")
_DEFAULT_STAGE = 2  # default ZeRO stage of DeepSpeedPlugin, accelerate 1.15
_TOTAL, _MICRO, _STEPS = BATCH_KEYS

Status = Literal["json", "yaml", "variable", "left", "nowhere"]
"""What a key of the Accelerate config becomes. ``json``: a key of the DeepSpeed JSON. ``yaml``: a key of the experiment config.
``variable``: an environment variable in the experiment config. ``left``: nothing, so the user must act. ``nowhere``: nothing,
because the key has no effect or no counterpart."""

_OTHER_TYPES: Mapping[str, str] = {
    "FSDP": "torch's FSDP shards in another way than DeepSpeed; make a file with DeepSpeed, ZeRO stage 3",
    "MEGATRON_LM": "Megatron-LM parallelism is set in code; make a file with DeepSpeed",
    **dict.fromkeys(("XLA", "TPU", "MULTI_NEURON"), "DeepSpeed runs on no TPU and no Neuron device"),
}
_JSON_TARGETS: Mapping[str, str] = {
    "mixed_precision": "fp16 or bf16",
    f"{_SECTION}.deepspeed_config_file": "its whole content",
    f"{_SECTION}.zero_stage": "zero_optimization.stage",
    f"{_SECTION}.{_STEPS}": _STEPS,
    f"{_SECTION}.gradient_clipping": "gradient_clipping",
    f"{_SECTION}.zero3_save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    f"{_SECTION}.offload_optimizer_device": "zero_optimization.offload_optimizer; NVMe in stage 3 only, else cpu",
    f"{_SECTION}.offload_param_device": "zero_optimization.offload_param",
    f"{_SECTION}.offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    f"{_SECTION}.offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
}
_VARIABLES: Mapping[str, str] = {
    "use_cpu": "DS_ACCELERATOR",  # not ACCELERATE_USE_CPU, which disables DeepSpeed
    "debug": "ACCELERATE_DEBUG_MODE",
    "enable_cpu_affinity": "ACCELERATE_CPU_AFFINITY",
    "dynamo_backend": "ACCELERATE_DYNAMO_BACKEND",
    **{
        f"dynamo_config.dynamo_{name}": f"ACCELERATE_DYNAMO_{name.upper()}"
        for name in ("backend", "mode", "use_fullgraph", "use_dynamic", "use_regional_compilation")
    },
    f"{_SECTION}.zero3_init_flag": "ACCELERATE_DEEPSPEED_ZERO3_INIT",
    f"{_SECTION}.deepspeed_moe_layer_cls_names": "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES",
}
_ACTIONS: Mapping[str, str] = {
    f"{_SECTION}.deepspeed_exclusion_filter": "disable slots with `det slot disable`, or set CUDA_VISIBLE_DEVICES for dstrial up",
    f"{_SECTION}.deepspeed_inclusion_filter": "disable slots with `det slot disable`, or set CUDA_VISIBLE_DEVICES for dstrial up",
    "num_machines": "`dstrial up` serves the slots of one machine; a Determined cluster deals them out over its machines",
    "gpu_ids": "the master deals out slots; CUDA_VISIBLE_DEVICES limits those of dstrial up",
    "fp8_config": "set Accelerate's variable ACCELERATE_FP8_… in environment.environment_variables",
    "parallelism_config": "set tensor_parallel or sequence parallelism in DeepSpeed's own JSON",
}
"""Key of the Accelerate config, or a section's name for all of the section's keys -> what the user must do instead."""


@dataclasses.dataclass(frozen=True, slots=True)
class Choices:
    """Settings of an experiment that an Accelerate config lacks; the user gives them."""

    entrypoint: str | None  # the training script with its arguments; None if unknown
    micro_batch_size: int | None  # None: that of the script's data loader
    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class ConvertedKey:
    key: str  # key of the Accelerate config, as `section.key` or `key`
    value: Any  # value in the Accelerate config
    status: Status
    explanation: str  # the target key, or the reason for the status


@dataclasses.dataclass(frozen=True, slots=True)
class Conversion:
    choices: Choices
    slots: int  # ranks of the job
    deepspeed: Mapping[str, Any]  # the DeepSpeed JSON
    variables: Mapping[str, str]  # environment variables
    overwrites: Mapping[str, Any]  # hyperparameter `overwrite_deepspeed_args`
    keys: Sequence[ConvertedKey]  # one for each key of the Accelerate config


def is_deepspeed(config: Mapping[str, Any]) -> bool:
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
    problems = list(_problems(config, label))
    if problems:
        raise ConfigError(problems)
    section = (config.get(_SECTION) or {}) if is_deepspeed(config) else {}
    file = deepspeed_file if is_deepspeed(config) else None
    micro = choices.micro_batch_size
    deepspeed = _deepspeed_json(config, section, micro) if file is None else dict(file)
    overwrites = {} if file is None or micro in (None, file.get(_MICRO)) else {_MICRO: micro}
    keys = []
    for key, value in config.items():
        inner = value.items() if isinstance(value, Mapping) and value else [("", value)]
        for name, one in inner:
            full = f"{key}.{name}" if name else key
            keys.append(ConvertedKey(full, one, *_place_of(config, full, one, deepspeed, file)))
    slots = max(int(config.get("num_processes") or 1), 1)
    precision = _precision_of(config) if file is None else "no"  # the DeepSpeed file sets the precision
    return Conversion(choices, slots, deepspeed, _variables(keys, precision), overwrites, keys)


def _problems(config: Mapping[str, Any], label: str) -> Iterator[ConfigProblem]:
    for key in _SECTIONS:
        if not isinstance(config.get(key) or {}, Mapping):
            yield ConfigProblem(f"{label}: {key}", repr(config[key]), "a mapping", "Write its keys below it.")
            return
    kind, slots = str(config.get("distributed_type")), config.get("num_processes")
    slots = 1 if slots is None else slots
    stage = (config.get(_SECTION) or {}).get("zero_stage", _DEFAULT_STAGE)
    wrong = []
    if config.get("compute_environment") not in (None, "LOCAL_MACHINE"):
        fix = "Make a file for a machine of your own with `accelerate config`."
        wrong.append(("compute_environment", config["compute_environment"], "LOCAL_MACHINE", fix))
    if kind in _OTHER_TYPES:
        fix = "Run `accelerate config` and choose DeepSpeed."
        wrong.append(("distributed_type", kind, f"DEEPSPEED ({_OTHER_TYPES[kind]})", fix))
    if not _is_integer(slots) or (slots < 1 and slots != -1):
        wrong.append(("num_processes", slots, "an integer of at least 1", "Correct it."))
    if _precision_of(config) not in ("no", "fp16", "bf16", "fp8"):
        wrong.append(("mixed_precision", config["mixed_precision"], "no, fp16, bf16 or fp8", "Correct it."))
    if config.get("fp16") is True and "mixed_precision" not in config:
        wrong.append(("fp16", True, "mixed_precision; fp16 is the old key", "Write mixed_precision: fp16."))
    if is_deepspeed(config) and (not _is_integer(stage) or stage < 0):
        wrong.append((f"{_SECTION}.zero_stage", stage, "an integer of at least 0", "Correct it."))
    for key, got, expected, fix in wrong:
        yield ConfigProblem(f"{label}: {key}", repr(got), expected, fix)


def _asks(value: Any) -> bool:
    """Return whether a value has an effect, unlike "no", "none" and ""."""
    return value is not False and value not in (None, "", {}, [], "no", "none", "NO", "all")


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _precision_of(config: Mapping[str, Any]) -> str:
    return str(config.get("mixed_precision") or "no").lower()


def _deepspeed_json(
    config: Mapping[str, Any], section: Mapping[str, Any], micro: int | None
) -> dict[str, Any]:
    precision = _precision_of(config)
    # Without DeepSpeed in the config, use ZeRO stage 0; with fp16 stage 1, because stage 0 has no loss scaling.
    plain_stage = 1 if precision == "fp16" else 0
    stage = section.get("zero_stage", _DEFAULT_STAGE) if is_deepspeed(config) else plain_stage
    zero: dict[str, Any] = {"stage": stage}
    for name, minimum in (("offload_optimizer", 1), ("offload_param", 3)):
        device = section.get(f"{name}_device")
        if _asks(device) and stage >= minimum:
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


def _variables(keys: Sequence[ConvertedKey], precision: str) -> dict[str, str]:
    found = {}
    for one in keys:
        if one.status == "variable":
            value = str(one.value).lower() if isinstance(one.value, bool) else str(one.value)
            found[one.explanation] = "cpu" if one.key == "use_cpu" else value
    return {**found, "ACCELERATE_MIXED_PRECISION": "fp8"} if precision == "fp8" else found


def _place_of(
    config: Mapping[str, Any],
    key: str,
    value: Any,
    deepspeed: Mapping[str, Any],
    file: Mapping[str, Any] | None,
) -> tuple[Status, str]:
    section, _, name = key.rpartition(".")
    zero, offload = deepspeed.get("zero_optimization") or {}, name.removesuffix("_device")
    if section == _SECTION and not is_deepspeed(config):
        return "left", f"accelerate ignores it under distributed_type {config['distributed_type']}"
    if key == "num_processes":
        return "yaml", "resources.slots_per_trial, which counts the slots of all machines; 1 if it is -1"
    if key == "distributed_type" and is_deepspeed(config):
        return "yaml", "hyperparameters.deepspeed_config"
    if key == "distributed_type":
        return "json", f"zero_optimization.stage {zero['stage']}"
    if key in _JSON_TARGETS and file is not None and name != "deepspeed_config_file":
        return "nowhere", "the file of deepspeed_config_file decides, and accelerate refuses both"
    if offload != name and offload not in zero and _asks(value):
        stages = "stage 3 only" if offload == "offload_param" else "stage 1, 2 or 3 only"
        return "left", f"DeepSpeed offloads this in {stages}, and this is stage {zero['stage']}"
    if key in _JSON_TARGETS:
        target = _JSON_TARGETS[key]
        is_in_json = value_at(deepspeed, target.partition(";")[0]) is not None
        if key == "mixed_precision":
            is_in_json = _precision_of(config) != "no"
        elif name == "deepspeed_config_file":
            is_in_json = file is not None
        return ("json", target) if is_in_json else ("nowhere", "it asks for nothing in this ZeRO stage")
    is_flag = section == "dynamo_config" or name == "zero3_init_flag"
    if key in _VARIABLES and (_asks(value) or (is_flag and isinstance(value, bool))):
        return "variable", _VARIABLES[key]
    action = _ACTIONS.get(key) or _ACTIONS.get(section)
    if action is not None and _asks(value) and (key, value) != ("num_machines", 1):
        return "left", action
    return "nowhere", "it asks for nothing, or has no counterpart here: dstrial.launch starts the ranks"


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
