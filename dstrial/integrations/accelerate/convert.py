"""Convert a file of ``accelerate config`` into an experiment and a DeepSpeed JSON.

Pure: reads nothing, writes nothing; Accelerate need not be installed.

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
SECTION = "deepspeed_config"
MARK = "CHOOSE"
"""The word in the comment of every line that the Accelerate config could not decide."""

_DEFAULT_STAGE = 2  # of DeepSpeedPlugin, accelerate 1.15
_TOTAL, _MICRO, _STEPS = BATCH_KEYS

Status = Literal["json", "yaml", "variable", "left", "unknown", "nowhere"]
"""Where a key is now: the DeepSpeed JSON, the experiment config, or a variable in it; left to the user, because no experiment
says it; not known to accelerate 1.15; nowhere, because it asks for nothing or has no counterpart."""


@dataclasses.dataclass(frozen=True, slots=True)
class Choices:
    """Settings that an Accelerate config does not have."""

    entrypoint: str | None  # the script with its arguments; None if unknown
    micro_batch_size: int | None  # None to leave it to the script's loader
    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class ConvertedKey:
    key: str  # `section.key`
    value: Any  # as in the file
    status: Status
    explanation: str  # the key there, or the reason


@dataclasses.dataclass(slots=True)
class Conversion:
    """The result of a conversion; ``KEYS`` fills it while the file is read."""

    config: Mapping[str, Any]  # the Accelerate config
    label: str  # its name in messages
    choices: Choices
    file: Mapping[str, Any] | None  # content of `deepspeed_config_file`, which decides everything in the JSON
    is_deepspeed: bool = True
    stage: int = 0
    slots: int = 1  # ranks of the job
    deepspeed: dict[str, Any] = dataclasses.field(default_factory=dict)  # the DeepSpeed JSON
    variables: dict[str, str] = dataclasses.field(
        default_factory=dict
    )  # environment variables of the experiment
    overwrites: dict[str, Any] = dataclasses.field(default_factory=dict)  # of the experiment, over the JSON
    keys: list[ConvertedKey] = dataclasses.field(default_factory=list)  # every key of the Accelerate config
    problems: list[ConfigProblem] = dataclasses.field(default_factory=list)

    def section(self, key: str) -> Mapping[str, Any]:
        """Return a section of the file; empty if it is missing."""
        value = self.config.get(key)
        if value in (None, ""):
            return {}
        if not isinstance(value, Mapping):
            where = f"{self.label}: {key}"
            raise ConfigError([ConfigProblem(where, repr(value), "a mapping", "Write its keys below it.")])
        return value

    def problem(self, key: str, value: Any, expected: str, fix: str = "Correct it.") -> Place:
        self.problems.append(ConfigProblem(f"{self.label}: {key}", repr(value), expected, fix))
        return "left", expected

    def whole_number(self, key: str, value: Any, at_least: int) -> int:
        """Return a whole number; the least one, with a problem, if the value is none."""
        if isinstance(value, int) and not isinstance(value, bool) and value >= at_least:
            return value
        self.problem(key, value, f"an integer of at least {at_least}")
        return at_least


Place: TypeAlias = tuple[Status, str]
Take: TypeAlias = Callable[[Conversion, str, Any], Place]
"""Takes one key and its value, changes the conversion, and says where the key is now, with an explanation."""


def convert(
    config: Mapping[str, Any],
    choices: Choices,
    *,
    label: str,
    deepspeed_file: Mapping[str, Any] | None = None,
) -> Conversion:
    """Convert an Accelerate config; ``choices`` has what it cannot say.

    ``label`` names the file in messages. ``deepspeed_file`` is the content of ``deepspeed_config.deepspeed_config_file``.
    ConfigError if the file is not for DeepSpeed on one's own machines, or a value has the wrong type.
    """
    is_deepspeed = config.get("distributed_type", "DEEPSPEED") == "DEEPSPEED"
    made = Conversion(config, label, choices, deepspeed_file if is_deepspeed else None, is_deepspeed)
    if is_deepspeed:
        stage = made.section(SECTION).get("zero_stage", _DEFAULT_STAGE)
        made.stage = made.whole_number(f"{SECTION}.zero_stage", stage, 0)
    elif config.get("mixed_precision", "fp16" if config.get("fp16") else "no") == "fp16":
        made.stage = 1  # in stage 0 DeepSpeed does not scale the loss
    micro = choices.micro_batch_size
    sizes = {_TOTAL: AUTO, _MICRO: AUTO} if micro is None else {_MICRO: micro}
    made.deepspeed = {**sizes, _STEPS: 1, "zero_optimization": {"stage": made.stage}}
    for key, value in config.items():
        for name, inner in _below(made, key, value):
            made.keys.append(ConvertedKey(name, inner, *_place_of(made, name, inner)))
    if made.problems:
        raise ConfigError(made.problems)
    if made.file is not None:
        made.deepspeed = dict(made.file)
        if micro not in (None, made.file.get(_MICRO)):
            made.overwrites = {_MICRO: micro}
    return made


def _below(made: Conversion, key: str, value: Any) -> list[tuple[str, Any]]:
    """Return the keys of a section with their values, or the key itself."""
    inner = made.section(key) if key in _SECTIONS else value
    if not isinstance(inner, Mapping) or not inner:
        return [(key, value)]
    return [(f"{key}.{name}", one) for name, one in inner.items()]


def _place_of(made: Conversion, key: str, value: Any) -> Place:
    section, _, name = key.rpartition(".")
    if section == SECTION and not made.is_deepspeed:
        return "left", f"accelerate ignores it under distributed_type {made.config['distributed_type']}"
    entry = KEYS.get(key) or KEYS.get(f"{section}.*")
    if entry is None:
        return "unknown", "no key of accelerate 1.15; it is not taken over"
    if isinstance(entry, str):
        return "nowhere", entry
    if value is None or value in ("", {}, []):
        return _NOTHING
    if made.file is not None and (key == "mixed_precision" or name in _IN_JSON):
        return "nowhere", "the file of deepspeed_config_file decides, and accelerate refuses both"
    return entry(made, key, value)


_NOTHING: Place = ("nowhere", "asks for nothing")
_SECTIONS = (SECTION, "dynamo_config", "fp8_config", "parallelism_config")
# Keys of the section whose content the file of `deepspeed_config_file` replaces.
_IN_JSON = (
    "zero_stage",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "zero3_save_16bit_model",
    "offload_optimizer_device",
    "offload_param_device",
    "offload_optimizer_nvme_path",
    "offload_param_nvme_path",
)
_OTHER_TYPES: Mapping[str, str] = {
    "FSDP": "torch's FSDP shards in another way than DeepSpeed; make a file with DeepSpeed, ZeRO stage 3",
    "MEGATRON_LM": "Megatron-LM parallelism is set in code; make a file with DeepSpeed",
    "XLA": "DeepSpeed does not run on TPUs",
    "TPU": "DeepSpeed does not run on TPUs",
    "MULTI_NEURON": "DeepSpeed does not run on Neuron devices",
}


def _left(reason: str, *nothing: Any) -> Take:
    """Return what leaves a key to the user, but where its value is in ``nothing``."""

    def take(made: Conversion, key: str, value: Any) -> Place:
        del made, key
        return _NOTHING if value in nothing else ("left", reason.format(value=value))

    return take


def _variable(variable: str) -> Take:
    """Return what hands a key that DeepSpeed's JSON lacks to ``DeepSpeedPlugin``."""

    def take(made: Conversion, key: str, value: Any) -> Place:
        del key
        made.variables[variable] = str(value).lower() if isinstance(value, bool) else str(value)
        return "variable", variable

    return take


def _flag(variable: str, word: str, reason: str = "") -> Take:
    def take(made: Conversion, key: str, value: Any) -> Place:
        del key
        if value is not True:
            return _NOTHING
        made.variables[variable] = word
        return "variable", reason or variable

    return take


def _take_compute_environment(made: Conversion, key: str, value: Any) -> Place:
    if value != "LOCAL_MACHINE":
        fix = "Make a file for a machine of your own with `accelerate config`."
        return made.problem(key, value, "LOCAL_MACHINE", fix)
    return "nowhere", "LOCAL_MACHINE is what every experiment runs on"


def _take_distributed_type(made: Conversion, key: str, value: Any) -> Place:
    kind = str(value)
    if kind in _OTHER_TYPES:
        fix = "Run `accelerate config` and choose DeepSpeed."
        return made.problem(key, value, f"DEEPSPEED ({_OTHER_TYPES[kind]})", fix)
    if kind == "DEEPSPEED":
        return "yaml", "hyperparameters.deepspeed_config"
    why = (
        "because DeepSpeed scales no loss in stage 0" if made.stage else "DeepSpeed's plain data parallelism"
    )
    return "json", f"zero_optimization.stage {made.stage}, {why}"


def _take_num_processes(made: Conversion, key: str, value: Any) -> Place:
    if value == -1:
        return "left", "open in the file too; resources.slots_per_trial is 1 until you set it"
    made.slots = made.whole_number(key, value, 1)
    return "yaml", "resources.slots_per_trial, which counts the slots of all machines"


def _take_mixed_precision(made: Conversion, key: str, value: Any) -> Place:
    precision = "no" if value is False else str(value).lower()
    if precision not in ("no", "fp16", "bf16", "fp8"):
        return made.problem(key, value, "no, fp16, bf16 or fp8")
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


def _take_fp16(made: Conversion, key: str, value: Any) -> Place:
    if "mixed_precision" in made.config:
        return "nowhere", "an old key, which accelerate ignores beside mixed_precision"
    return _take_mixed_precision(made, key, "fp16" if value is True else "no")


def _take_dynamo(made: Conversion, key: str, value: Any) -> Place:
    if str(value).upper() == "NO":
        return _NOTHING
    variable = f"ACCELERATE_DYNAMO_{key.rpartition('.')[2].removeprefix('dynamo_').upper()}"
    made.variables[variable] = str(value)
    return "variable", f"{variable}, with which Accelerate compiles DeepSpeed's engine"


def _take_stage(made: Conversion, key: str, value: Any) -> Place:
    del made, key, value  # read before all other keys, which depend on it
    return "json", "zero_optimization.stage"


def _take_steps(made: Conversion, key: str, value: Any) -> Place:
    made.deepspeed[_STEPS] = AUTO if value == AUTO else made.whole_number(key, value, 1)
    return "json", _STEPS


def _take_clipping(made: Conversion, key: str, value: Any) -> Place:
    if value == AUTO:
        return "nowhere", "Accelerate fills in 1.0, which is DeepSpeed's default too"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return made.problem(key, value, "a number")
    made.deepspeed["gradient_clipping"] = value
    return "json", "gradient_clipping"


def _take_save16(made: Conversion, key: str, value: Any) -> Place:
    del key
    if made.stage != 3:
        return "nowhere", f"for ZeRO stage 3 only, and this is stage {made.stage}"
    made.deepspeed["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = value is True
    return "json", "zero_optimization.stage3_gather_16bit_weights_on_model_save"


def _take_device(made: Conversion, key: str, value: Any) -> Place:
    section = key.removeprefix(f"{SECTION}.").removesuffix("_device")
    needed = (3,) if section == "offload_param" else (1, 2, 3)
    if value == "none":
        return _NOTHING
    if value not in ("cpu", "nvme"):
        return made.problem(key, value, "none, cpu or nvme")
    if made.stage not in needed:
        stages = "stage 3" if needed == (3,) else "stage 1, 2 or 3"
        return "left", f"DeepSpeed offloads this in {stages} only, and this is stage {made.stage}"
    device, extra = value, ""
    if value == "nvme" and made.stage != 3:
        device = "cpu"
        extra = f': "cpu", because DeepSpeed offloads to NVMe in stage 3 only (this is stage {made.stage})'
    made.deepspeed["zero_optimization"].setdefault(section, {})["device"] = device
    return "json", f"zero_optimization.{section}.device{extra}"


def _take_path(made: Conversion, key: str, value: Any) -> Place:
    section = key.removeprefix(f"{SECTION}.").removesuffix("_nvme_path")
    if made.section(SECTION).get(f"{section}_device") != "nvme" or made.stage != 3:
        return "nowhere", "nothing is offloaded to NVMe"
    made.deepspeed["zero_optimization"].setdefault(section, {})["nvme_path"] = str(value)
    return "json", f"zero_optimization.{section}.nvme_path"


def _take_file(made: Conversion, key: str, value: Any) -> Place:
    del key, value
    return _NOTHING if made.file is None else ("json", "its whole content")


_ONE_LAUNCHER = "dstrial.launch starts the ranks, on the machines that the master or the cluster gives"
_FILTER = _left(
    "not part of an experiment: disable slots with `det slot disable`, or set CUDA_VISIBLE_DEVICES for `dstrial up`",
    "none",
)
_FP8 = _left("set the variable ACCELERATE_FP8_… of Accelerate in environment.environment_variables")
_PARALLELISM = _left("set tensor_parallel or sequence parallelism in DeepSpeed's own JSON", 1, False)
_TPU = "for TPUs only"
_OTHER_LIBRARY = "settings of another library than DeepSpeed"
KEYS: Mapping[str, Take | str] = {
    "compute_environment": _take_compute_environment,
    "distributed_type": _take_distributed_type,
    "num_processes": _take_num_processes,
    "num_machines": _left(
        "`dstrial up` serves the slots of one machine; on a Determined cluster the slots of a trial are dealt out over as many "
        "machines as it takes",
        1,
    ),
    "gpu_ids": _left(
        "the master deals out slots; set CUDA_VISIBLE_DEVICES={value} for `dstrial up` to offer only these",
        "all",
    ),
    "use_cpu": _flag(
        "DS_ACCELERATOR",
        "cpu",
        "DS_ACCELERATOR=cpu, because Accelerate's own ACCELERATE_USE_CPU turns DeepSpeed off",
    ),
    "mixed_precision": _take_mixed_precision,
    "fp16": _take_fp16,
    "dynamo_backend": _take_dynamo,
    # `TorchDynamoPlugin` reads each of these as ACCELERATE_DYNAMO_….
    **{
        f"dynamo_config.dynamo_{name}": _take_dynamo
        for name in ("backend", "mode", "use_fullgraph", "use_dynamic", "use_regional_compilation")
    },
    "dynamo_config": _take_dynamo,
    "fp8_config": _FP8,
    "fp8_config.*": _FP8,
    "parallelism_config": _PARALLELISM,
    "parallelism_config.*": _PARALLELISM,
    "debug": _flag("ACCELERATE_DEBUG_MODE", "true"),
    "enable_cpu_affinity": _flag("ACCELERATE_CPU_AFFINITY", "1"),
    SECTION: _left("its keys are below it"),
    f"{SECTION}.deepspeed_config_file": _take_file,
    f"{SECTION}.zero_stage": _take_stage,
    f"{SECTION}.gradient_accumulation_steps": _take_steps,
    f"{SECTION}.gradient_clipping": _take_clipping,
    f"{SECTION}.zero3_save_16bit_model": _take_save16,
    f"{SECTION}.offload_optimizer_device": _take_device,
    f"{SECTION}.offload_param_device": _take_device,
    f"{SECTION}.offload_optimizer_nvme_path": _take_path,
    f"{SECTION}.offload_param_nvme_path": _take_path,
    f"{SECTION}.zero3_init_flag": _variable("ACCELERATE_DEEPSPEED_ZERO3_INIT"),
    f"{SECTION}.deepspeed_moe_layer_cls_names": _variable("ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES"),
    f"{SECTION}.deepspeed_exclusion_filter": _FILTER,
    f"{SECTION}.deepspeed_inclusion_filter": _FILTER,
    f"{SECTION}.deepspeed_multinode_launcher": _ONE_LAUNCHER,
    f"{SECTION}.deepspeed_hostfile": "the master or the cluster knows its machines; num_processes gives the slots",
    "machine_rank": _ONE_LAUNCHER,
    "main_process_ip": _ONE_LAUNCHER,
    "main_process_port": "dstrial.launch takes a free port",
    "rdzv_backend": _ONE_LAUNCHER,
    "same_network": _ONE_LAUNCHER,
    "main_training_function": "used by notebooks and TPUs only; the entrypoint is a script",
    **dict.fromkeys(
        ("downcast_bf16", "tpu_name", "tpu_zone", "tpu_use_cluster", "tpu_use_sudo", "tpu_vm", "tpu_env"),
        _TPU,
    ),
    **dict.fromkeys(("command_file", "commands"), _TPU),
    **dict.fromkeys(
        ("fsdp_config", "fsdp_config.*", "megatron_lm_config", "megatron_lm_config.*"), _OTHER_LIBRARY
    ),
    **dict.fromkeys(
        ("mpirun_config", "mpirun_config.*"),
        "dstrial.launch starts the ranks; under your own mpirun, start the script itself with it",
    ),
}
"""What takes each key, or why a key without a counterpart goes nowhere; ``section.*`` is for all other keys of a section."""

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
    """Return an experiment config; its comment calls the Accelerate config ``source``."""
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
