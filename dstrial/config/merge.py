"""Merge overwrites into a DeepSpeed config, and nothing else: no defaults, no validation."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dstrial.config.documents import read_json
from dstrial.config.dotted_keys import nested
from dstrial.errors import ConfigError, ConfigProblem


def merge_deepspeed(base: Mapping[str, Any], overwrite: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two DeepSpeed configs, key by key at every depth.

    A mapping merges into a mapping; anything else (lists too) replaces what was there; a ``None``
    deletes the key. A dotted key of the overwrite, ``zero_optimization.stage``, stands for the nested one. Neither argument is
    changed, and the result shares nothing with them.

    Args:
        base: the config as the user's JSON file has it.
        overwrite: what to change; need not be a complete config.

    Returns:
        A new dictionary. ``None`` values of ``base`` are kept: there they are DeepSpeed's null.
    """
    return _merged(base, nested(overwrite))


def _merged(base: Mapping[str, Any], overwrite: Mapping[str, Any]) -> dict[str, Any]:
    merged: dict[str, Any] = {key: copy.deepcopy(value) for key, value in base.items()}
    for key, value in overwrite.items():
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, Mapping):
            below = merged.get(key)
            merged[key] = _merged(below if isinstance(below, Mapping) else {}, value)
        else:
            merged[key] = copy.deepcopy(value)
    return merged


def overwrite_deepspeed_config(
    base_ds_config: str | dict[str, Any], source_ds_dict: dict[str, Any]
) -> dict[str, Any]:
    """Return a DeepSpeed config with values of the experiment config put into it.

    Unlike Determined's function of this name, a ``None`` deletes the key.

    Args:
        base_ds_config: path of a DeepSpeed JSON file, or its content.
        source_ds_dict: what to change, usually ``hyperparameters.overwrite_deepspeed_args``.

    Returns:
        A new dictionary, to hand to ``deepspeed.initialize``; neither argument is changed.

    Raises:
        ConfigError: the file cannot be read, is not JSON, holds no object, or gives a key twice.
        TypeError: ``base_ds_config`` is neither a path nor a dictionary.

    Source: determined.pytorch.deepspeed.overwrite_deepspeed_config (0.38.1).
    """
    if isinstance(base_ds_config, str):
        document = read_json(Path(base_ds_config), base_ds_config)
        if not isinstance(document.value, dict):
            problem = ConfigProblem(
                f"{base_ds_config}:1: the file",
                f"a {type(document.value).__name__}",
                "a JSON object with DeepSpeed's keys",
                "Put the settings between braces.",
            )
            raise ConfigError([problem])
        base: Any = document.value
    else:
        base = base_ds_config
    if not isinstance(base, dict):
        raise TypeError(
            f"base_ds_config is {type(base_ds_config).__name__}; expected the path of a DeepSpeed JSON file or a dict. "
            "Pass the value of hyperparameters.deepspeed_config."
        )
    return merge_deepspeed(base, source_ds_dict)
