"""Convert a file of ``accelerate config`` into an experiment and a DeepSpeed JSON.

Pure: reads nothing, writes nothing; Accelerate need not be installed. ``dstrial check`` finds wrong values of the JSON.

Source: accelerate 1.15 ``commands/config/config_args.py`` (``ClusterConfig``), ``commands/config/cluster.py`` (the
questionnaire), ``utils/launch.py`` and ``utils/dataclasses.py:DeepSpeedPlugin`` (how Accelerate uses each key).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

from dstrial.config.batch import AUTO, BATCH_KEYS
from dstrial.config.documents import yaml_text
from dstrial.errors import ConfigError, ConfigProblem

JSON_NAME, YAML_NAME = "ds_config.json", "experiment.yaml"
MARK = "CHOOSE"
"""Word that marks, in the comments of the YAML, every line whose value the user must choose."""

_SECTION = "deepspeed_config"
_SECTIONS = (_SECTION, "dynamo_config", "fp8_config", "parallelism_config")
_DEFAULT_STAGE = 2  # default of DeepSpeedPlugin, accelerate 1.15
_TOTAL, _MICRO, _STEPS = BATCH_KEYS

Status = Literal["json", "yaml", "variable", "left", "unknown", "nowhere"]
"""Where a converted key ends up. ``json``: the DeepSpeed JSON. ``yaml``: the experiment config. ``variable``: an environment
variable in the experiment config. ``left``: the user must act. ``unknown``: accelerate 1.15 has no such key. ``nowhere``: the
key has no effect or no counterpart."""

Place: TypeAlias = tuple[Status, str]
"""A key's status, and the target key or the reason."""

_NOTHING: Place = ("nowhere", "asks for nothing")


@dataclasses.dataclass(frozen=True, slots=True)
class Choices:
    """Settings that an Accelerate config does not have."""

    entrypoint: str | None  # the script with its arguments; None if unknown
    micro_batch_size: int | None  # None: the script's loader determines it
    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class ConvertedKey:
    key: str  # `section.key`
    value: Any  # value in the Accelerate config
    status: Status
    explanation: str  # the target key, or the reason for the status


@dataclasses.dataclass(slots=True)
class Conversion:
    """The result of a conversion; the rule of each key adds its part."""

    config: Mapping[str, Any]  # the Accelerate config
    choices: Choices
    file: Mapping[str, Any] | None  # content of `deepspeed_config_file`, used as the DeepSpeed JSON
    stage: int = 0  # ZeRO stage
    slots: int = 1  # ranks of the job
    deepspeed: dict[str, Any] = dataclasses.field(default_factory=dict)  # the DeepSpeed JSON
    variables: dict[str, str] = dataclasses.field(default_factory=dict)  # environment variables
    overwrites: dict[str, Any] = dataclasses.field(default_factory=dict)  # `overwrite_deepspeed_args`
    keys: list[ConvertedKey] = dataclasses.field(default_factory=list)  # all keys of `config`


Rule: TypeAlias = Callable[[Conversion, Any], Place]
"""Convert the value of a key, changing the conversion; return where the key went."""


class _RefusedError(Exception):
    """A value that cannot be converted. Arguments: the expected value, and a fix."""


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
        deepspeed_file: content of the file that ``deepspeed_config.deepspeed_config_file`` names, if any.

    Raises:
        ConfigError: the config is for a backend that DeepSpeed cannot replace or for a hosted service, has the old key
            ``fp16``, or a section, the ZeRO stage, the precision or the number of processes is wrong.
    """
    problems: list[ConfigProblem] = []
    made = Conversion(config, choices, deepspeed_file if is_deepspeed(config) else None)
    sections = {key: config.get(key) or {} for key in _SECTIONS}
    for key, section in sections.items():
        if not isinstance(section, Mapping):
            where = f"{label}: {key}"
            raise ConfigError([ConfigProblem(where, repr(section), "a mapping", "Write its keys below it.")])
    if is_deepspeed(made.config):
        stage = sections[_SECTION].get("zero_stage", _DEFAULT_STAGE)
        if not isinstance(stage, int) or isinstance(stage, bool) or stage < 0:
            where = f"{label}: {_SECTION}.zero_stage"
            problems.append(ConfigProblem(where, repr(stage), "an integer of at least 0", "Correct it."))
        else:
            made.stage = stage
    elif config.get("mixed_precision") == "fp16":
        made.stage = 1  # in stage 0 DeepSpeed does not scale the loss
    micro = choices.micro_batch_size
    sizes = {_TOTAL: AUTO, _MICRO: AUTO} if micro is None else {_MICRO: micro}
    made.deepspeed = {**sizes, _STEPS: 1, "zero_optimization": {"stage": made.stage}}
    for key, value in config.items():
        inner = value.items() if isinstance(value, Mapping) and value else [("", value)]
        for name, one in inner:
            full = f"{key}.{name}" if name else key
            try:
                made.keys.append(ConvertedKey(full, one, *_place_of(made, full, one)))
            except _RefusedError as refused:
                problems.append(ConfigProblem(f"{label}: {full}", repr(one), *refused.args))
    if problems:
        raise ConfigError(problems)
    if made.file is not None:
        made.deepspeed = dict(made.file)
        if micro not in (None, made.file.get(_MICRO)):
            made.overwrites = {_MICRO: micro}
    return made


def _place_of(made: Conversion, key: str, value: Any) -> Place:
    section = key.rpartition(".")[0]
    if section == _SECTION and not is_deepspeed(made.config):
        return "left", f"accelerate ignores it under distributed_type {made.config['distributed_type']}"
    rule = _RULES.get(key) or _RULES.get(f"{section}.*")
    if rule is None:
        return "unknown", "no key of accelerate 1.15; it is not taken over"
    if isinstance(rule, str):
        return "nowhere", rule
    if value is None or value in ("", {}, []):
        return _NOTHING
    if made.file is not None and key in _OF_JSON:
        return "nowhere", "the file of deepspeed_config_file decides, and accelerate refuses both"
    return rule(made, value)


def _variable(name: str, wanted: Any = None, text: str = "") -> Rule:
    """Return the rule of a key whose value becomes environment variable ``name``.

    With ``wanted``, only that value sets the variable, to ``text`` if not empty; otherwise every value sets it.
    """

    def rule(made: Conversion, value: Any) -> Place:
        if wanted is not None and value != wanted:
            return _NOTHING
        made.variables[name] = text or (str(value).lower() if isinstance(value, bool) else str(value))
        return "variable", name

    return rule


def _dynamo(name: str) -> Rule:
    # `TorchDynamoPlugin` reads each `dynamo` key as a variable ACCELERATE_DYNAMO_….
    variable = f"ACCELERATE_DYNAMO_{name.upper()}"

    def rule(made: Conversion, value: Any) -> Place:
        if str(value).upper() == "NO":
            return _NOTHING
        made.variables[variable] = str(value)
        return "variable", f"{variable}, with which Accelerate compiles DeepSpeed's engine"

    return rule


def _left(reason: str, *nothing: Any) -> Rule:
    """Return the rule of a key that is not converted and that the user must handle.

    ``reason`` tells the user why. A value in ``nothing`` needs no handling.
    """
    return lambda _made, value: _NOTHING if value in nothing else ("left", reason.format(value=value))


def _compute_environment(_made: Conversion, value: Any) -> Place:
    if value != "LOCAL_MACHINE":
        fix = "Make a file for a machine of your own with `accelerate config`."
        raise _RefusedError("LOCAL_MACHINE", fix)
    return "nowhere", "LOCAL_MACHINE is what every experiment runs on"


def _distributed_type(made: Conversion, value: Any) -> Place:
    if (kind := str(value)) in _OTHER_TYPES:
        fix = "Run `accelerate config` and choose DeepSpeed."
        raise _RefusedError(f"DEEPSPEED ({_OTHER_TYPES[kind]})", fix)
    if is_deepspeed(made.config):
        return "yaml", "hyperparameters.deepspeed_config"
    why = (
        "because DeepSpeed scales no loss in stage 0" if made.stage else "DeepSpeed's plain data parallelism"
    )
    return "json", f"zero_optimization.stage {made.stage}, {why}"


def _num_processes(made: Conversion, value: Any) -> Place:
    if value == -1:
        return "left", "open in the file too; resources.slots_per_trial is 1 until you set it"
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _RefusedError("an integer of at least 1", "Correct it.")
    made.slots = value
    return "yaml", "resources.slots_per_trial, which counts the slots of all machines"


def _use_cpu(made: Conversion, value: Any) -> Place:
    if value is not True:
        return _NOTHING
    made.variables["DS_ACCELERATOR"] = "cpu"
    return "variable", "DS_ACCELERATOR=cpu, because Accelerate's own ACCELERATE_USE_CPU turns DeepSpeed off"


def _old_fp16(made: Conversion, value: Any) -> Place:
    if value is not True or "mixed_precision" in made.config:
        return "nowhere", "an old key, which asks for nothing here"
    raise _RefusedError("mixed_precision; fp16 is the old key", "Write mixed_precision: fp16.")


def _precision(made: Conversion, value: Any) -> Place:
    precision = "no" if value is False else str(value).lower()
    if precision not in ("no", "fp16", "bf16", "fp8"):
        raise _RefusedError("no, fp16, bf16 or fp8", "Correct it.")
    if precision == "no":
        return "nowhere", "asks for nothing: DeepSpeed trains in fp32 unless told otherwise"
    if precision == "fp16":
        made.deepspeed["fp16"] = {"enabled": True, "auto_cast": True}
        return "json", "fp16.enabled, and auto_cast as Accelerate sets it"
    made.deepspeed["bf16"] = {"enabled": True}
    if precision == "bf16":
        return "json", "bf16.enabled"
    made.variables["ACCELERATE_MIXED_PRECISION"] = "fp8"
    return "json", "bf16.enabled, and ACCELERATE_MIXED_PRECISION=fp8: Accelerate's fp8 runs on top of bf16"


def _top_level(name: str) -> Rule:
    def rule(made: Conversion, value: Any) -> Place:
        if value == AUTO and name == "gradient_clipping":
            return "nowhere", "Accelerate fills in 1.0, which is DeepSpeed's default too"
        made.deepspeed[name] = value
        return "json", name

    return rule


def _save_16bit(made: Conversion, value: Any) -> Place:
    if made.stage != 3:
        return "nowhere", f"for ZeRO stage 3 only, and this is stage {made.stage}"
    made.deepspeed["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = value is True
    return "json", "zero_optimization.stage3_gather_16bit_weights_on_model_save"


def _offload_path(section: str) -> Rule:
    def rule(made: Conversion, value: Any) -> Place:
        if made.config[_SECTION].get(f"{section}_device") != "nvme" or made.stage != 3:
            return "nowhere", "nothing is offloaded to NVMe"
        made.deepspeed["zero_optimization"].setdefault(section, {})["nvme_path"] = str(value)
        return "json", f"zero_optimization.{section}.nvme_path"

    return rule


def _offload_device(section: str, minimum: int) -> Rule:
    def rule(made: Conversion, value: Any) -> Place:
        stage, extra = made.stage, ""
        if value == "none":
            return _NOTHING
        if stage < minimum:
            stages = "stage 3" if minimum == 3 else "stage 1, 2 or 3"
            return "left", f"DeepSpeed offloads this in {stages} only, and this is stage {stage}"
        if value == "nvme" and stage != 3:
            value = "cpu"
            extra = f': "cpu", because DeepSpeed offloads to NVMe in stage 3 only (this is stage {stage})'
        made.deepspeed["zero_optimization"].setdefault(section, {})["device"] = value
        return "json", f"zero_optimization.{section}.device{extra}"

    return rule


_OF_JSON: Mapping[str, Rule] = {
    "mixed_precision": _precision,
    f"{_SECTION}.zero_stage": lambda _made, _value: ("json", "zero_optimization.stage"),
    f"{_SECTION}.{_STEPS}": _top_level(_STEPS),
    f"{_SECTION}.gradient_clipping": _top_level("gradient_clipping"),
    f"{_SECTION}.zero3_save_16bit_model": _save_16bit,
    f"{_SECTION}.offload_optimizer_device": _offload_device("offload_optimizer", 1),
    f"{_SECTION}.offload_param_device": _offload_device("offload_param", 3),
    f"{_SECTION}.offload_optimizer_nvme_path": _offload_path("offload_optimizer"),
    f"{_SECTION}.offload_param_nvme_path": _offload_path("offload_param"),
}
"""Keys that are ignored if ``deepspeed_config_file`` is given."""

_OTHER_TYPES: Mapping[str, str] = {
    "FSDP": "torch's FSDP shards in another way than DeepSpeed; make a file with DeepSpeed, ZeRO stage 3",
    "MEGATRON_LM": "Megatron-LM parallelism is set in code; make a file with DeepSpeed",
    **dict.fromkeys(("XLA", "TPU", "MULTI_NEURON"), "DeepSpeed runs on no TPU and no Neuron device"),
}
_FILTER = _left(
    "not part of an experiment: disable slots with `det slot disable`, or set CUDA_VISIBLE_DEVICES for `dstrial up`",
    "none",
)
_OTHER_LIBRARY = "settings of another library than DeepSpeed"
_ONE_LAUNCHER = "dstrial.launch starts the ranks, on the machines that the master or the cluster gives"
_RULES: Mapping[str, Rule | str] = {
    **_OF_JSON,
    "compute_environment": _compute_environment,
    "distributed_type": _distributed_type,
    "num_processes": _num_processes,
    "use_cpu": _use_cpu,
    "fp16": _old_fp16,
    "debug": _variable("ACCELERATE_DEBUG_MODE", True, "true"),
    "enable_cpu_affinity": _variable("ACCELERATE_CPU_AFFINITY", True, "1"),
    "dynamo_backend": _dynamo("backend"),
    "dynamo_config": _NOTHING[1],
    **{
        f"dynamo_config.dynamo_{name}": _dynamo(name)
        for name in ("backend", "mode", "use_fullgraph", "use_dynamic", "use_regional_compilation")
    },
    _SECTION: _left("its keys are below it"),
    f"{_SECTION}.deepspeed_config_file": lambda made, _value: (
        _NOTHING if made.file is None else ("json", "its whole content")
    ),
    f"{_SECTION}.zero3_init_flag": _variable("ACCELERATE_DEEPSPEED_ZERO3_INIT"),
    f"{_SECTION}.deepspeed_moe_layer_cls_names": _variable("ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES"),
    f"{_SECTION}.deepspeed_exclusion_filter": _FILTER,
    f"{_SECTION}.deepspeed_inclusion_filter": _FILTER,
    f"{_SECTION}.deepspeed_hostfile": "the master or the cluster knows its machines; num_processes gives the slots",
    f"{_SECTION}.deepspeed_multinode_launcher": _ONE_LAUNCHER,
    **dict.fromkeys(("machine_rank", "main_process_ip", "rdzv_backend", "same_network"), _ONE_LAUNCHER),
    **dict.fromkeys(("main_process_port", "mpirun_config", "mpirun_config.*"), _ONE_LAUNCHER),
    "main_training_function": "used by notebooks and TPUs only; the entrypoint is a script",
    "num_machines": _left(
        "`dstrial up` serves the slots of one machine; on a Determined cluster the slots of a trial are dealt out over as many "
        "machines as it takes",
        1,
    ),
    "gpu_ids": _left(
        "the master deals out slots; set CUDA_VISIBLE_DEVICES={value} for `dstrial up` to offer only these",
        "all",
    ),
    **dict.fromkeys(
        ("fp8_config", "fp8_config.*"),
        _left("set the variable ACCELERATE_FP8_… of Accelerate in environment.environment_variables"),
    ),
    **dict.fromkeys(
        ("parallelism_config", "parallelism_config.*"),
        _left("set tensor_parallel or sequence parallelism in DeepSpeed's own JSON", 1, False),
    ),
    **dict.fromkeys(("downcast_bf16", "command_file", "commands", "tpu_name", "tpu_zone"), "for TPUs only"),
    **dict.fromkeys(("tpu_use_cluster", "tpu_use_sudo", "tpu_vm", "tpu_env"), "for TPUs only"),
    **dict.fromkeys(("fsdp_config", "fsdp_config.*"), _OTHER_LIBRARY),
    **dict.fromkeys(("megatron_lm_config", "megatron_lm_config.*"), _OTHER_LIBRARY),
}
"""Key of accelerate 1.15 -> its rule, or why it has no counterpart; ``section.*`` means all keys of a section."""

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
    """Return the experiment config as YAML; its first comment names ``source``."""
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
