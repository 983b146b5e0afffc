"""Convert what ``accelerate config`` writes, and say where every key went.

It becomes a DeepSpeed JSON and an experiment config. Pure: reads nothing, writes nothing; Accelerate need not be installed.

Source of the keys: accelerate 1.15 ``utils/launch.py``, ``commands/config/config_args.py``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import yaml

from dstrial.config.batch import AUTO, BATCH_KEYS
from dstrial.errors import ConfigError
from dstrial.integrations.accelerate.converter.deepspeed_keys import FILE_DECIDES, SECTION, take_plugin
from dstrial.integrations.accelerate.converter.result import (
    JSON_NAME,
    NOTHING,
    UNKNOWN,
    Choices,
    Conversion,
    ConversionDraft,
    Take,
)
from dstrial.integrations.accelerate.converter.unsupported_keys import (
    DYNAMO_VARIABLES,
    EMPTY,
    FLAG_VARIABLES,
    OTHER_TYPES,
    REASONS,
)

MARK = "CHOOSE"
"""The word in the comment of every line that the Accelerate config could not decide."""

DEFAULT_METRIC = "validation_loss"
_DEFAULT_BATCHES = 1000
_DEFAULT_PERIOD = 100
_DEFAULT_SCRIPT = "train.py"
_DEFAULT_STAGE = 2  # of DeepSpeedPlugin, accelerate 1.15


def convert(
    config: Mapping[str, Any],
    choices: Choices,
    *,
    label: str,
    deepspeed_file: Mapping[str, Any] | None = None,
) -> Conversion:
    """Convert an Accelerate config.

    Args:
        config: the file's content; not changed.
        choices: what it cannot say.
        label: how messages call the file.
        deepspeed_file: content of the file that ``deepspeed_config.deepspeed_config_file`` names, if it names one.

    Raises:
        ConfigError: it is for something else than DeepSpeed on machines of one's own, or a value has the wrong type.
    """
    draft = ConversionDraft(config, label, deepspeed_file)
    plugin = draft.section(SECTION)
    if plugin or config.get("distributed_type", "DEEPSPEED") == "DEEPSPEED":
        stage = plugin.get("zero_stage", _DEFAULT_STAGE)
        draft.stage = draft.whole_number(stage, f"{SECTION}.zero_stage", 0)
    for key, value in config.items():
        take_key(draft, key, value)
    if draft.problems:
        raise ConfigError(draft.problems)
    deepspeed, overwrites = _with_sizes(draft, choices.micro_batch_size)
    if choices.learning_rate is not None and "optimizer" not in deepspeed:
        deepspeed["optimizer"] = {"type": "AdamW", "params": {"lr": choices.learning_rate}}
    return Conversion(
        deepspeed, draft.slots, draft.variables, overwrites, tuple(draft.keys), choices, draft.is_cpu
    )


def _with_sizes(draft: ConversionDraft, micro: int | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the JSON with batch sizes, and what the experiment config sets over it."""
    if draft.file is not None:
        deepspeed = dict(draft.file)
        is_other = micro is not None and deepspeed.get(BATCH_KEYS[1]) != micro
        return deepspeed, {BATCH_KEYS[1]: micro} if is_other else {}
    steps = draft.deepspeed.get(BATCH_KEYS[2], 1)
    sizes: dict[str, Any] = {BATCH_KEYS[1]: AUTO if micro is None else micro, BATCH_KEYS[2]: steps}
    if micro is None:
        sizes = {BATCH_KEYS[0]: AUTO, **sizes}
    rest = {key: value for key, value in draft.deepspeed.items() if key != BATCH_KEYS[2]}
    return {**sizes, **rest, "zero_optimization": {"stage": draft.stage, **draft.zero}}, {}


def experiment_yaml(conversion: Conversion, source: str) -> str:
    """Return the text of an experiment config.

    Args:
        conversion: what was converted.
        source: how the comment at the top calls the Accelerate config.
    """
    choices = conversion.choices
    script = choices.entrypoint or _DEFAULT_SCRIPT
    lines = [
        f"# Made of {source} by `dstrial convert accelerate`. Lines marked {MARK} wait for your decision.",
        f"name: {_scalar(choices.name)}",
        f"entrypoint: {_scalar(f'python3 -m dstrial.launch {script}')}"
        + ("" if choices.entrypoint else f" # {MARK}: the training script, with its arguments"),
        "",
        "hyperparameters:",
        "  # Relative to the directory of the model definition.",
        f"  deepspeed_config: {JSON_NAME}",
    ]
    if conversion.overwrites:
        lines += ["  overwrite_deepspeed_args:"]
        lines += [f"    {key}: {_scalar(value)}" for key, value in conversion.overwrites.items()]
    elif _is_open(conversion):
        lines += [
            f"  # {MARK}: the micro batch of one rank, as in {{train_micro_batch_size_per_gpu: 8}}; as long as it is auto,",
            "  # Accelerate takes the batch size of the first loader that the script prepares.",
            "  overwrite_deepspeed_args: {}",
        ]
    else:
        lines += ["  overwrite_deepspeed_args: {}"]
    if "optimizer" in conversion.deepspeed:
        lines += [
            "  # The JSON has the optimizer: the script prepares accelerate.utils.DummyOptim in its place."
        ]
    else:
        lines += [
            f"  # {MARK}: nothing, if the script makes its own optimizer; with one in the JSON it takes DummyOptim."
        ]
    lines += [
        "",
        "searcher:",
        f"  name: single # {MARK}: or random, grid, adaptive_asha, async_halving",
        f"  metric: {_scalar(choices.metric or DEFAULT_METRIC)}"
        + ("" if choices.metric else f" # {MARK}: what the script reports; of a Trainer that is eval_loss"),
        "  smaller_is_better: true",
        "  max_length:",
        f"    batches: {choices.num_batches or _DEFAULT_BATCHES}"
        + ("" if choices.num_batches else f" # {MARK}: how long to train, in optimizer steps"),
        "",
        f"min_validation_period: {{batches: {_DEFAULT_PERIOD}}} # {MARK}: when the reporter has the script validate",
        f"min_checkpoint_period: {{batches: {_DEFAULT_PERIOD}}} # {MARK}: how much a crash may cost",
        "",
        "resources:",
        f"  slots_per_trial: {conversion.slots}",
    ]
    if conversion.variables:
        lines += ["", "environment:", "  environment_variables:"]
        lines += [f"    - {_scalar(f'{name}={value}')}" for name, value in conversion.variables.items()]
    return "\n".join(lines) + "\n"


def deepspeed_json(conversion: Conversion) -> str:
    """Return the text of the DeepSpeed JSON."""
    return json.dumps(conversion.deepspeed, indent=2, ensure_ascii=False) + "\n"


def open_decisions(conversion: Conversion) -> list[str]:
    """Return what the Accelerate config could not decide, one sentence each."""
    found = []
    if conversion.choices.entrypoint is None:
        found.append(
            f"entrypoint: the training script ({_DEFAULT_SCRIPT} is a guess); give it with --entrypoint"
        )
    if _is_open(conversion):
        found.append(
            "train_micro_batch_size_per_gpu: auto, taken from the script's loader; give it with --micro-batch"
        )
    if "optimizer" in conversion.deepspeed:
        found.append(
            "optimizer: the JSON's; a script with a loop of its own prepares DummyOptim in its place"
        )
    else:
        found.append(
            "optimizer: the script's own, or add one to the JSON and use accelerate.utils.DummyOptim"
        )
    if conversion.choices.metric is None:
        found.append(f"searcher.metric: {DEFAULT_METRIC} is a guess")
    if conversion.choices.num_batches is None:
        found.append(f"searcher.max_length: {_DEFAULT_BATCHES} batches is a guess")
    found.append(
        f"min_validation_period and min_checkpoint_period: {_DEFAULT_PERIOD} batches are guesses; not for a Trainer, which has "
        "--eval_steps and --save_steps"
    )
    return found


def _is_open(conversion: Conversion) -> bool:
    sizes = {**conversion.deepspeed, **conversion.overwrites}
    known = [sizes.get(key) for key in ("train_batch_size", "train_micro_batch_size_per_gpu")]
    return not any(isinstance(size, int) for size in known)


def _scalar(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("\n...\n").strip()


def take_key(draft: ConversionDraft, key: str, value: Any) -> None:
    """Take one key of the file, with everything below it."""
    if key in _TAKES:
        _TAKES[key](draft, key, value)
    elif key in FLAG_VARIABLES:
        _take_flag(draft, key, value)
    elif key in REASONS:
        _take_no_counterpart(draft, key, value)
    else:
        draft.note(key, value, "unknown", UNKNOWN)


def _take_compute_environment(draft: ConversionDraft, key: str, value: Any) -> None:
    if value != "LOCAL_MACHINE":
        fix = "Make a file for a machine of your own with `accelerate config`."
        draft.problem(key, value, "LOCAL_MACHINE", fix)
    draft.note(key, value, "nowhere", REASONS[key])


def _take_distributed_type(draft: ConversionDraft, key: str, value: Any) -> None:
    kind = str(value)
    if kind in OTHER_TYPES:
        fix = "Run `accelerate config` and choose DeepSpeed."
        draft.problem(key, value, f"DEEPSPEED ({OTHER_TYPES[kind]})", fix)
    elif kind == "DEEPSPEED":
        draft.note(key, value, "yaml", "hyperparameters.deepspeed_config")
    elif draft.section(SECTION):
        reason = "hyperparameters.deepspeed_config, because the file has a deepspeed_config"
        draft.note(key, value, "yaml", reason)
    else:
        draft.note(key, value, "json", "zero_optimization.stage 0, DeepSpeed's plain data parallelism")


def _take_num_processes(draft: ConversionDraft, key: str, value: Any) -> None:
    if value == -1:
        draft.note(
            key, value, "left", "open in the file too; resources.slots_per_trial is 1 until you set it"
        )
        return
    draft.slots = draft.whole_number(value, key, 1)
    draft.note(key, value, "yaml", "resources.slots_per_trial, which counts the slots of all machines")


def _take_num_machines(draft: ConversionDraft, key: str, value: Any) -> None:
    if value in (1, None):
        draft.note(key, value, "nowhere", NOTHING)
        return
    reason = (
        "`dstrial up` serves the slots of one machine; on a Determined cluster the slots of a trial are dealt out over as many "
        "machines as it takes"
    )
    draft.note(key, value, "left", reason)


def _take_gpu_ids(draft: ConversionDraft, key: str, value: Any) -> None:
    if value in (None, "all"):
        draft.note(key, value, "nowhere", "asks for nothing: all are offered")
    else:
        reason = f"the master deals out slots; set CUDA_VISIBLE_DEVICES={value} for `dstrial up` to offer only these"
        draft.note(key, value, "left", reason)


def _take_use_cpu(draft: ConversionDraft, key: str, value: Any) -> None:
    if value is not True:
        draft.note(key, value, "nowhere", NOTHING)
        return
    draft.is_cpu = True
    draft.variables["DS_ACCELERATOR"] = "cpu"
    reason = "DS_ACCELERATOR=cpu, because Accelerate's own ACCELERATE_USE_CPU turns DeepSpeed off"
    draft.note(key, value, "variable", reason)


def _take_mixed_precision(draft: ConversionDraft, key: str, value: Any) -> None:
    precision = "no" if value in (None, False) else str(value).lower()
    if precision not in ("no", "fp16", "bf16", "fp8"):
        draft.problem(key, value, "no, fp16, bf16 or fp8", "Correct it.")
    elif precision == "no":
        draft.note(key, value, "nowhere", "asks for nothing: DeepSpeed trains in fp32 unless told otherwise")
    elif draft.file is not None:
        draft.note(key, value, "nowhere", FILE_DECIDES)
    elif precision == "fp16":
        draft.deepspeed["fp16"] = {"enabled": True, "auto_cast": True}
        draft.note(key, value, "json", "fp16.enabled, and auto_cast as Accelerate sets it")
    else:
        draft.deepspeed["bf16"] = {"enabled": True}
        extra = ""
        if precision == "fp8":
            draft.variables["ACCELERATE_MIXED_PRECISION"] = "fp8"
            extra = ", and ACCELERATE_MIXED_PRECISION=fp8: Accelerate's fp8 runs on top of bf16"
        draft.note(key, value, "json", f"bf16.enabled{extra}")


def _take_fp16(draft: ConversionDraft, key: str, value: Any) -> None:
    if "mixed_precision" in draft.config:
        draft.note(key, value, "nowhere", "an old key, which accelerate ignores beside mixed_precision")
    else:
        _take_mixed_precision(draft, key, "fp16" if value is True else "no")


def _take_dynamo_backend(draft: ConversionDraft, key: str, value: Any) -> None:
    if str(value).upper() == "NO":
        draft.note(key, value, "nowhere", NOTHING)
    else:
        _set_dynamo(draft, key, value)


def _take_dynamo_config(draft: ConversionDraft, key: str, value: Any) -> None:
    draft.take_each(key, value, _set_dynamo)


def _set_dynamo(draft: ConversionDraft, key: str, value: Any) -> None:
    name = key.rpartition(".")[2]
    variable = DYNAMO_VARIABLES.get(name if name.startswith("dynamo_") else f"dynamo_{name}")
    if variable is None:
        draft.note(key, value, "unknown", UNKNOWN)
        return
    draft.variables[variable] = str(value)
    draft.note(key, value, "variable", f"{variable}, with which Accelerate compiles DeepSpeed's engine")


def _take_fp8_config(draft: ConversionDraft, key: str, value: Any) -> None:
    draft.take_each(key, value, _take_fp8_key)


def _take_fp8_key(draft: ConversionDraft, key: str, value: Any) -> None:
    words = key.rpartition(".")[2].removeprefix("fp8_").upper()
    if words == "OVERRIDE_LINEAR_PRECISION" and isinstance(value, (list, tuple)):
        for part, flag in zip(("FPROP", "DGRAD", "WGRAD"), value, strict=False):
            draft.variables[f"ACCELERATE_FP8_OVERRIDE_{part}"] = str(flag)
        draft.note(key, value, "variable", "ACCELERATE_FP8_OVERRIDE_FPROP, _DGRAD and _WGRAD")
        return
    draft.variables[f"ACCELERATE_FP8_{words}"] = str(value)
    draft.note(key, value, "variable", f"ACCELERATE_FP8_{words}")


def _take_parallelism_config(draft: ConversionDraft, key: str, value: Any) -> None:
    draft.take_each(key, value, _take_parallelism_key)


def _take_parallelism_key(draft: ConversionDraft, key: str, value: Any) -> None:
    name = key.rpartition(".")[2].removeprefix("parallelism_config_")
    if name == "tp_size" and isinstance(value, int) and value > 1:
        draft.deepspeed["tensor_parallel"] = {"autotp_size": value}
        draft.note(key, value, "json", "tensor_parallel.autotp_size")
    elif value in (1, *EMPTY):
        draft.note(key, value, "nowhere", NOTHING)
    else:
        reason = "accelerate offers it with FSDP only; set sequence parallelism in DeepSpeed's own JSON"
        draft.note(key, value, "left", reason)


def _take_flag(draft: ConversionDraft, key: str, value: Any) -> None:
    if value is not True:
        draft.note(key, value, "nowhere", NOTHING)
        return
    draft.variables[FLAG_VARIABLES[key]] = "1" if key == "enable_cpu_affinity" else "true"
    draft.note(key, value, "variable", FLAG_VARIABLES[key])


def _take_no_counterpart(draft: ConversionDraft, key: str, value: Any) -> None:
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            draft.note(f"{key}.{name}", inner, "nowhere", REASONS[key])
    else:
        draft.note(key, value, "nowhere", REASONS[key])


_TAKES: Mapping[str, Take] = {
    "compute_environment": _take_compute_environment,
    "distributed_type": _take_distributed_type,
    "num_processes": _take_num_processes,
    "num_machines": _take_num_machines,
    "gpu_ids": _take_gpu_ids,
    "use_cpu": _take_use_cpu,
    "mixed_precision": _take_mixed_precision,
    "fp16": _take_fp16,
    "dynamo_backend": _take_dynamo_backend,
    "dynamo_config": _take_dynamo_config,
    "fp8_config": _take_fp8_config,
    "parallelism_config": _take_parallelism_config,
    SECTION: take_plugin,
}
"""What takes each key that is more than a flag or a thing without a counterpart."""
