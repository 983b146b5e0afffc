"""What becomes of an Accelerate config's keys outside its DeepSpeed section.

Source: accelerate 1.15 ``utils/launch.py``, ``commands/config/config_args.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dstrial.integrations.accelerate.converter.deepspeed_keys import FILE_DECIDES, SECTION, take_plugin
from dstrial.integrations.accelerate.converter.result import NOTHING, UNKNOWN, ConversionDraft, Take
from dstrial.integrations.accelerate.converter.unsupported_keys import (
    DYNAMO_VARIABLES,
    EMPTY,
    FLAG_VARIABLES,
    OTHER_TYPES,
    REASONS,
)


def take_key(draft: ConversionDraft, key: str, value: Any) -> None:
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
    elif draft.stage:
        draft.note(
            key, value, "json", "zero_optimization.stage 1, because DeepSpeed scales no loss in stage 0"
        )
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
