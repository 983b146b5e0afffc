"""Every key of an Accelerate config and its place in an experiment.

Source: accelerate 1.15 ``commands/config/config_args.py`` (``ClusterConfig``), ``commands/config/cluster.py`` (the
questionnaire), ``utils/launch.py`` and ``utils/dataclasses.py:DeepSpeedPlugin`` (how Accelerate uses each key).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from dstrial.config.batch import AUTO, BATCH_KEYS
from dstrial.integrations.accelerate.converter.result import ConversionDraft

SECTION = "deepspeed_config"

Take: TypeAlias = Callable[[ConversionDraft, str, Any], None]
"""Takes one key, named ``key`` or ``section.key``, and records its place."""

_NOTHING = "asks for nothing"
_UNKNOWN = "no key of accelerate 1.15; it is not taken over"
_FILE_DECIDES = "the file of deepspeed_config_file decides, and accelerate refuses both"
_ONE_LAUNCHER = "dstrial.launch starts the ranks, on the machines that the master or the cluster gives"
_FILTER = "not part of an experiment: disable slots with `det slot disable`, or set CUDA_VISIBLE_DEVICES for `dstrial up`"
_TPU = "for TPUs only"
_OTHER_LIBRARY = "settings of another library than DeepSpeed"
_EMPTY: tuple[Any, ...] = (None, "", {}, [], False)  # values that ask for nothing
_OTHER_TYPES: Mapping[str, str] = {
    "FSDP": "torch's FSDP shards in another way than DeepSpeed; make a file with DeepSpeed, ZeRO stage 3",
    "MEGATRON_LM": "Megatron-LM parallelism is set in code; make a file with DeepSpeed",
    "XLA": "DeepSpeed does not run on TPUs",
    "TPU": "DeepSpeed does not run on TPUs",
    "MULTI_NEURON": "DeepSpeed does not run on Neuron devices",
}
# `TorchDynamoPlugin` reads each of these as ACCELERATE_DYNAMO_….
_DYNAMO = ("backend", "mode", "use_fullgraph", "use_dynamic", "use_regional_compilation")


def take_key(draft: ConversionDraft, key: str, value: Any) -> None:
    """Take one key of the file, with everything below it."""
    entry = KEYS.get(key)
    if entry is None:
        draft.note(key, value, "unknown", _UNKNOWN)
    elif not isinstance(entry, str):
        entry(draft, key, value)
    elif isinstance(value, Mapping) and value:
        for name, inner in value.items():
            draft.note(f"{key}.{name}", inner, "nowhere", entry)
    else:
        draft.note(key, value, "nowhere", entry)


def _take_plugin(draft: ConversionDraft, key: str, value: Any) -> None:
    plugin = draft.section(SECTION)
    if not plugin:
        draft.note(key, value, "nowhere", _NOTHING)
    for name, inner in plugin.items():
        if draft.is_deepspeed:
            take_key(draft, f"{SECTION}.{name}", inner)
        else:
            reason = f"accelerate ignores it under distributed_type {draft.config['distributed_type']}"
            draft.note(f"{SECTION}.{name}", inner, "left", reason)


def _each(take: Take) -> Take:
    """Return what takes every key of a section; an empty section asks for nothing."""

    def take_section(draft: ConversionDraft, key: str, value: Any) -> None:
        if value in _EMPTY:
            draft.note(key, value, "nowhere", _NOTHING)
            return
        for name, inner in draft.section(key).items():
            take(draft, f"{key}.{name}", inner)

    return take_section


def _in_json(take: Take) -> Take:
    """Return what takes a key of DeepSpeed's JSON, unless a file has the whole JSON."""

    def take_unless_file(draft: ConversionDraft, key: str, value: Any) -> None:
        if draft.file is not None:
            draft.note(key, value, "nowhere", _FILE_DECIDES)
        else:
            take(draft, key, value)

    return take_unless_file


def _variable(variable: str) -> Take:
    """Return what hands a key that DeepSpeed's JSON lacks to ``DeepSpeedPlugin``."""

    def take(draft: ConversionDraft, key: str, value: Any) -> None:
        if value in (None, ""):
            draft.note(key, value, "nowhere", _NOTHING)
            return
        draft.variables[variable] = str(value).lower() if isinstance(value, bool) else str(value)
        draft.note(key, value, "variable", variable)

    return take


def _flag(variable: str, word: str) -> Take:
    def take(draft: ConversionDraft, key: str, value: Any) -> None:
        if value is not True:
            draft.note(key, value, "nowhere", _NOTHING)
            return
        draft.variables[variable] = word
        draft.note(key, value, "variable", variable)

    return take


def _take_filter(draft: ConversionDraft, key: str, value: Any) -> None:
    draft.note(key, value, "nowhere" if value in (None, "", "none") else "left", _FILTER)


def _take_file(draft: ConversionDraft, key: str, value: Any) -> None:
    if draft.file is None:
        draft.note(key, value, "nowhere", _NOTHING)
    else:
        draft.note(key, value, "json", "its whole content")


def _take_stage(draft: ConversionDraft, key: str, value: Any) -> None:
    draft.note(key, value, "json", "zero_optimization.stage")


def _take_steps(draft: ConversionDraft, key: str, value: Any) -> None:
    draft.deepspeed[BATCH_KEYS[2]] = AUTO if value == AUTO else draft.whole_number(value, key, 1)
    draft.note(key, value, "json", _name(key))


def _take_clipping(draft: ConversionDraft, key: str, value: Any) -> None:
    if value in (None, AUTO):
        draft.note(key, value, "nowhere", "Accelerate fills in 1.0, which is DeepSpeed's default too")
    elif isinstance(value, bool) or not isinstance(value, (int, float)):
        draft.problem(key, value, "a number", "Correct it.")
    else:
        draft.deepspeed["gradient_clipping"] = value
        draft.note(key, value, "json", _name(key))


def _take_save16(draft: ConversionDraft, key: str, value: Any) -> None:
    if draft.stage != 3:
        draft.note(key, value, "nowhere", f"for ZeRO stage 3 only, and this is stage {draft.stage}")
        return
    draft.zero["stage3_gather_16bit_weights_on_model_save"] = value is True
    draft.note(key, value, "json", "zero_optimization.stage3_gather_16bit_weights_on_model_save")


def _take_device(draft: ConversionDraft, key: str, value: Any) -> None:
    section = _name(key).removesuffix("_device")
    device = str(value or "none")
    if device == "none":
        draft.note(key, value, "nowhere", _NOTHING)
    elif device not in ("cpu", "nvme"):
        draft.problem(key, value, "none, cpu or nvme", "Correct it.")
    elif draft.stage == 0 or (section == "offload_param" and draft.stage != 3):
        needs = "stage 3" if section == "offload_param" else "stage 1, 2 or 3"
        draft.note(
            key, value, "left", f"DeepSpeed offloads this in {needs} only, and this is stage {draft.stage}"
        )
    else:
        moved = device == "nvme" and draft.stage != 3
        draft.zero.setdefault(section, {})["device"] = "cpu" if moved else device
        extra = f': "cpu", because DeepSpeed offloads to NVMe in stage 3 only (this is stage {draft.stage})'
        draft.note(key, value, "json", f"zero_optimization.{section}.device{extra if moved else ''}")


def _take_path(draft: ConversionDraft, key: str, value: Any) -> None:
    section = _name(key).removesuffix("_nvme_path")
    plugin: Mapping[str, Any] = draft.section(SECTION)
    if plugin.get(f"{section}_device") != "nvme" or draft.stage != 3:
        draft.note(key, value, "nowhere", "nothing is offloaded to NVMe")
        return
    draft.zero.setdefault(section, {})["nvme_path"] = str(value)
    draft.note(key, value, "json", f"zero_optimization.{section}.nvme_path")


def _name(key: str) -> str:
    return key.removeprefix(f"{SECTION}.")


def _take_compute_environment(draft: ConversionDraft, key: str, value: Any) -> None:
    if value != "LOCAL_MACHINE":
        fix = "Make a file for a machine of your own with `accelerate config`."
        draft.problem(key, value, "LOCAL_MACHINE", fix)
    draft.note(key, value, "nowhere", "LOCAL_MACHINE is what every experiment runs on")


def _take_distributed_type(draft: ConversionDraft, key: str, value: Any) -> None:
    kind = str(value)
    if kind in _OTHER_TYPES:
        fix = "Run `accelerate config` and choose DeepSpeed."
        draft.problem(key, value, f"DEEPSPEED ({_OTHER_TYPES[kind]})", fix)
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
        draft.note(key, value, "nowhere", _NOTHING)
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
        draft.note(key, value, "nowhere", _NOTHING)
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
        draft.note(key, value, "nowhere", _FILE_DECIDES)
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
        draft.note(key, value, "nowhere", _NOTHING)
    else:
        _set_dynamo(draft, key, value)


def _set_dynamo(draft: ConversionDraft, key: str, value: Any) -> None:
    name = key.rpartition(".")[2].removeprefix("dynamo_")
    if name not in _DYNAMO:
        draft.note(key, value, "unknown", _UNKNOWN)
        return
    variable = f"ACCELERATE_DYNAMO_{name.upper()}"
    draft.variables[variable] = str(value)
    draft.note(key, value, "variable", f"{variable}, with which Accelerate compiles DeepSpeed's engine")


def _take_fp8_key(draft: ConversionDraft, key: str, value: Any) -> None:
    words = key.rpartition(".")[2].removeprefix("fp8_").upper()
    if words == "OVERRIDE_LINEAR_PRECISION" and isinstance(value, (list, tuple)):
        for part, flag in zip(("FPROP", "DGRAD", "WGRAD"), value, strict=False):
            draft.variables[f"ACCELERATE_FP8_OVERRIDE_{part}"] = str(flag)
        draft.note(key, value, "variable", "ACCELERATE_FP8_OVERRIDE_FPROP, _DGRAD and _WGRAD")
        return
    draft.variables[f"ACCELERATE_FP8_{words}"] = str(value)
    draft.note(key, value, "variable", f"ACCELERATE_FP8_{words}")


def _take_parallelism_key(draft: ConversionDraft, key: str, value: Any) -> None:
    name = key.rpartition(".")[2].removeprefix("parallelism_config_")
    if name == "tp_size" and isinstance(value, int) and value > 1:
        draft.deepspeed["tensor_parallel"] = {"autotp_size": value}
        draft.note(key, value, "json", "tensor_parallel.autotp_size")
    elif value in (1, *_EMPTY):
        draft.note(key, value, "nowhere", _NOTHING)
    else:
        reason = "accelerate offers it with FSDP only; set sequence parallelism in DeepSpeed's own JSON"
        draft.note(key, value, "left", reason)


KEYS: Mapping[str, Take | str] = {
    "compute_environment": _take_compute_environment,
    "distributed_type": _take_distributed_type,
    "num_processes": _take_num_processes,
    "num_machines": _take_num_machines,
    "gpu_ids": _take_gpu_ids,
    "use_cpu": _take_use_cpu,
    "mixed_precision": _take_mixed_precision,
    "fp16": _take_fp16,
    "dynamo_backend": _take_dynamo_backend,
    "dynamo_config": _each(_set_dynamo),
    "fp8_config": _each(_take_fp8_key),
    "parallelism_config": _each(_take_parallelism_key),
    "debug": _flag("ACCELERATE_DEBUG_MODE", "true"),
    "enable_cpu_affinity": _flag("ACCELERATE_CPU_AFFINITY", "1"),
    SECTION: _take_plugin,
    f"{SECTION}.deepspeed_config_file": _take_file,
    f"{SECTION}.zero_stage": _in_json(_take_stage),
    f"{SECTION}.gradient_accumulation_steps": _in_json(_take_steps),
    f"{SECTION}.gradient_clipping": _in_json(_take_clipping),
    f"{SECTION}.zero3_save_16bit_model": _in_json(_take_save16),
    f"{SECTION}.offload_optimizer_device": _in_json(_take_device),
    f"{SECTION}.offload_param_device": _in_json(_take_device),
    f"{SECTION}.offload_optimizer_nvme_path": _in_json(_take_path),
    f"{SECTION}.offload_param_nvme_path": _in_json(_take_path),
    f"{SECTION}.zero3_init_flag": _variable("ACCELERATE_DEEPSPEED_ZERO3_INIT"),
    f"{SECTION}.deepspeed_moe_layer_cls_names": _variable("ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES"),
    f"{SECTION}.deepspeed_exclusion_filter": _take_filter,
    f"{SECTION}.deepspeed_inclusion_filter": _take_filter,
    f"{SECTION}.deepspeed_multinode_launcher": _ONE_LAUNCHER,
    f"{SECTION}.deepspeed_hostfile": "the master or the cluster knows its machines; num_processes gives the slots",
    "machine_rank": _ONE_LAUNCHER,
    "main_process_ip": _ONE_LAUNCHER,
    "main_process_port": "dstrial.launch takes a free port",
    "rdzv_backend": _ONE_LAUNCHER,
    "same_network": _ONE_LAUNCHER,
    "main_training_function": "used by notebooks and TPUs only; the entrypoint is a script",
    "downcast_bf16": _TPU,
    "tpu_name": _TPU,
    "tpu_zone": _TPU,
    "tpu_use_cluster": _TPU,
    "tpu_use_sudo": _TPU,
    "tpu_vm": _TPU,
    "tpu_env": _TPU,
    "command_file": _TPU,
    "commands": _TPU,
    "fsdp_config": _OTHER_LIBRARY,
    "megatron_lm_config": _OTHER_LIBRARY,
    "mpirun_config": "dstrial.launch starts the ranks; under your own mpirun, start the script itself with it",
}
"""What takes each key, or why a key without a counterpart goes nowhere."""
