"""Convert what ``accelerate config`` writes, and say where every key went.

It becomes a DeepSpeed JSON and an experiment config. Pure: reads nothing, writes nothing; Accelerate need not be installed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dstrial.config.batch import AUTO, BATCH_KEYS
from dstrial.config.documents import yaml_text
from dstrial.errors import ConfigError
from dstrial.integrations.accelerate.converter.keys import SECTION, take_key
from dstrial.integrations.accelerate.converter.result import JSON_NAME, Choices, Conversion, ConversionDraft

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
    """Convert an Accelerate config; ``choices`` has what it cannot say.

    ``label`` names the file in messages. ``deepspeed_file`` is the content of ``deepspeed_config.deepspeed_config_file``.
    ConfigError if the file is not for DeepSpeed on one's own machines, or a value has the wrong type.
    """
    draft = ConversionDraft(config, label, deepspeed_file)
    if draft.is_deepspeed:
        stage = draft.section(SECTION).get("zero_stage", _DEFAULT_STAGE)
        draft.stage = draft.whole_number(stage, f"{SECTION}.zero_stage", 0)
    elif config.get("mixed_precision", "fp16" if config.get("fp16") else "no") == "fp16":
        draft.stage = 1  # in stage 0 DeepSpeed does not scale the loss
    for key, value in config.items():
        take_key(draft, key, value)
    if draft.problems:
        raise ConfigError(draft.problems)
    deepspeed, overwrites = _with_sizes(draft, choices.micro_batch_size)
    return Conversion(
        deepspeed, draft.slots, draft.variables, overwrites, tuple(draft.keys), choices, draft.is_cpu
    )


def _with_sizes(draft: ConversionDraft, micro: int | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the JSON with batch sizes, and the experiment config's overwrites."""
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
    """Return an experiment config; its comment calls the Accelerate config ``source``."""
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
        f"  metric: {DEFAULT_METRIC} # {MARK}: what the script reports; of a Trainer that is eval_loss",
        "  smaller_is_better: true",
        "  max_length:",
        f"    batches: {_DEFAULT_BATCHES} # {MARK}: how long to train, in optimizer steps",
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
    return [
        *found,
        f"searcher.metric: {DEFAULT_METRIC} is a guess",
        f"searcher.max_length: {_DEFAULT_BATCHES} batches is a guess",
        f"min_validation_period and min_checkpoint_period: {_DEFAULT_PERIOD} batches are guesses; not for a Trainer, which has "
        "--eval_steps and --save_steps",
    ]


def _is_open(conversion: Conversion) -> bool:
    sizes = {**conversion.deepspeed, **conversion.overwrites}
    known = [sizes.get(key) for key in ("train_batch_size", "train_micro_batch_size_per_gpu")]
    return not any(isinstance(size, int) for size in known)


def _scalar(value: Any) -> str:
    text = yaml_text([value]).removeprefix("- ").strip()
    return text if "\n" not in text else json.dumps(value, ensure_ascii=False)
