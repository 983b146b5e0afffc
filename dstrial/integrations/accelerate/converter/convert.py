"""Convert what ``accelerate config`` writes, and say where every key went.

It becomes a DeepSpeed JSON and an experiment config. Pure: reads nothing, writes nothing; Accelerate need not be installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dstrial.config.batch import AUTO, BATCH_KEYS
from dstrial.errors import ConfigError
from dstrial.integrations.accelerate.converter.deepspeed_keys import SECTION
from dstrial.integrations.accelerate.converter.result import Choices, Conversion, ConversionDraft
from dstrial.integrations.accelerate.converter.top_level_keys import take_key

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
