"""What becomes of the keys of an Accelerate config's ``deepspeed_config``.

Source: accelerate 1.15 ``utils/dataclasses.py:DeepSpeedPlugin`` (how they become DeepSpeed's), ``utils/launch.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dstrial.config.batch import AUTO, BATCH_KEYS
from dstrial.integrations.accelerate.converter.result import NOTHING, UNKNOWN, ConversionDraft, Take
from dstrial.integrations.accelerate.converter.unsupported_keys import FILTERS, PLUGIN_VARIABLES, REASONS

SECTION = "deepspeed_config"
FILE_DECIDES = "the file of deepspeed_config_file decides, and accelerate refuses both"


def take_plugin(draft: ConversionDraft, key: str, value: Any) -> None:
    plugin = draft.section(SECTION)
    if not plugin:
        draft.note(key, value, "nowhere", NOTHING)
    for name, inner in plugin.items():
        full = f"{SECTION}.{name}"
        if not draft.is_deepspeed:
            reason = f"accelerate ignores it under distributed_type {draft.config['distributed_type']}"
            draft.note(full, inner, "left", reason)
        elif name == "deepspeed_config_file":
            _take_file(draft, full, inner)
        elif name in PLUGIN_VARIABLES:
            _take_variable(draft, full, inner)
        elif full in REASONS:
            asks = full in FILTERS and inner not in (None, "", "none")
            draft.note(full, inner, "left" if asks else "nowhere", REASONS[full])
        elif name not in _TAKES:
            draft.note(full, inner, "unknown", UNKNOWN)
        elif draft.file is not None:
            draft.note(full, inner, "nowhere", FILE_DECIDES)
        else:
            _TAKES[name](draft, full, inner)


def _take_file(draft: ConversionDraft, key: str, value: Any) -> None:
    if draft.file is None:
        draft.note(key, value, "nowhere", NOTHING)
    else:
        draft.note(key, value, "json", "its whole content")


def _take_variable(draft: ConversionDraft, key: str, value: Any) -> None:
    if value in (None, ""):
        draft.note(key, value, "nowhere", NOTHING)
        return
    variable = PLUGIN_VARIABLES[_name(key)]
    draft.variables[variable] = str(value).lower() if isinstance(value, bool) else str(value)
    draft.note(key, value, "variable", variable)


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
        draft.note(key, value, "nowhere", NOTHING)
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


_TAKES: Mapping[str, Take] = {
    "zero_stage": _take_stage,
    "gradient_accumulation_steps": _take_steps,
    "gradient_clipping": _take_clipping,
    "zero3_save_16bit_model": _take_save16,
    "offload_optimizer_device": _take_device,
    "offload_param_device": _take_device,
    "offload_optimizer_nvme_path": _take_path,
    "offload_param_nvme_path": _take_path,
}
"""What takes each key that stands for one of DeepSpeed's JSON."""
