"""Merge overwrites into DeepSpeed configs, and experiment configs into templates.

Merging sets no defaults and validates nothing. Source: Determined 0.38.1, schemas/test_cases/v0/merging.yaml and the merge rules
of its configs.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dstrial.config.diagnostics import KeyPath
from dstrial.config.documents import read_json
from dstrial.config.experiment_config.environment import by_device, joined_variables
from dstrial.config.experiment_config.hyperparameters import is_specification
from dstrial.errors import ConfigError, ConfigProblem


def merge_deepspeed(base: Mapping[str, Any], overwrite: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a DeepSpeed config with overwrites merged in at every depth.

    Two mappings are merged. Any other value of ``overwrite`` (also a list) replaces the value of ``base``. ``None`` deletes
    the key.
    """
    merged: dict[str, Any] = {key: copy.deepcopy(value) for key, value in base.items()}
    for key, value in overwrite.items():
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, Mapping):
            below = merged.get(key)
            merged[key] = merge_deepspeed(below if isinstance(below, Mapping) else {}, value)
        else:
            merged[key] = copy.deepcopy(value)
    return merged


def overwrite_deepspeed_config(
    base_ds_config: str | dict[str, Any], source_ds_dict: dict[str, Any]
) -> dict[str, Any]:
    """Return a DeepSpeed config with the experiment config's overwrites applied.

    Unlike in Determined's function of this name, ``None`` deletes a key.

    Args:
        base_ds_config: path of a DeepSpeed JSON file, or its content.
        source_ds_dict: values to set, usually ``hyperparameters.overwrite_deepspeed_args``.

    Returns:
        A new dictionary for ``deepspeed.initialize``; neither argument is changed.

    Raises:
        ConfigError: the file cannot be read, is not a JSON object, or has a duplicate key.
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
            f"Expected string or dict for base_ds_config argument. It is {type(base_ds_config).__name__}; pass the path of a "
            "DeepSpeed JSON file or a dict, for example hyperparameters.deepspeed_config."
        )
    return merge_deepspeed(base, source_ds_dict)


# Fields of a searcher or storage that have the same meaning for all types.
_SEARCHER_COMMON = ("metric", "smaller_is_better", "source_trial_id", "source_checkpoint_uuid")
_STORAGE_COMMON = ("save_experiment_best", "save_trial_best", "save_trial_latest")


def merge_template(template: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config in which a template's values replace missing or null ones.

    Mappings are merged at every depth, with these exceptions. Labels of both are combined. Proxy ports of the template are
    added unless the config uses the same port. Environment variables of the template come before the config's. Log policies are
    merged by name. A hyperparameter is merged only if it is a group in both configs. If the types of searcher or storage
    differ, only fields common to all types are merged. Periods are not merged, because their units may differ. Both arguments
    are partial configs that need not be valid; neither is modified.
    """
    return _mapping(template, config, ())


def _mapping(base: Mapping[str, Any], over: Mapping[str, Any], path: KeyPath) -> dict[str, Any]:
    merged = {key: copy.deepcopy(value) for key, value in base.items()}
    for key, value in over.items():
        below = merged.get(key)
        if value is None and key in merged and path[:1] != ("hyperparameters",):
            continue
        merged[key] = copy.deepcopy(value) if below is None else _value(below, value, (*path, str(key)))
    return merged


def _value(base: Any, over: Any, path: KeyPath) -> Any:
    if path in _SPECIAL:
        return _SPECIAL[path](base, over)
    if (
        path[0] == "hyperparameters"
        and len(path) > 1
        and not (_is_nested(base, path) and _is_nested(over, path))
    ):
        return copy.deepcopy(over)
    if isinstance(base, Mapping) and isinstance(over, Mapping):
        return _mapping(base, over, path)
    return copy.deepcopy(over)


def _is_nested(value: Any, path: KeyPath) -> bool:
    return isinstance(value, Mapping) and not is_specification(value, path)


def _replaced(_base: Any, over: Any) -> Any:
    return copy.deepcopy(over)


def _merge_typed(kind: str, common: Sequence[str]) -> Callable[[Any, Any], Any]:
    """Return a function that merges two sections whose fields depend on the type.

    ``kind`` is the key with the type, such as ``name`` for a searcher. If the types differ, only fields in ``common`` are
    merged.
    """

    def merge(base: Any, over: Any) -> Any:
        if not isinstance(base, Mapping) or not isinstance(over, Mapping):
            return copy.deepcopy(over)
        wanted = over.get(kind)
        if wanted is not None and base.get(kind) not in (None, wanted):
            base = {key: base[key] for key in common if key in base}
        return _shallow(base, over)

    return merge


def _shallow(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    given = {key: value for key, value in over.items() if value is not None or key not in base}
    return copy.deepcopy({**base, **given})


def _merge_lists_by(name: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    """Return a function that merges two lists; ``name(item)`` identifies equal items.

    The result has the items of the second list, then those of the first that the second does not have.
    """

    def merge(base: Any, over: Any) -> Any:
        if not isinstance(base, list) or not isinstance(over, list):
            return copy.deepcopy(over)
        taken = {_hashable(name(item)) for item in over}
        return copy.deepcopy([*over, *(item for item in base if _hashable(name(item)) not in taken)])

    return merge


def _hashable(item: Any) -> str:
    return json.dumps(item, sort_keys=True, default=str)


def _itself(item: Any) -> Any:
    return item


def _proxy_port(item: Any) -> Any:
    return item.get("proxy_port") if isinstance(item, Mapping) else item


def _image(base: Any, over: Any) -> Any:
    return {**by_device(base), **by_device(over)} if isinstance(over, Mapping) else over


def merge_policies(base: Any, over: Any) -> Any:
    """Return log policies merged by name; those of ``base`` come first.

    A policy of ``over`` with only a name, or with a null pattern, disables the policy of that name in ``base``. If ``base`` or
    ``over`` is not a list, a copy of ``over`` is returned.
    """
    if not isinstance(base, list) or not isinstance(over, list):
        return copy.deepcopy(over)
    merged: dict[str, Any] = {}
    for policy in (*base, *over):
        name = policy.get("name") if isinstance(policy, Mapping) else None
        key = _hashable(policy if name is None else [name])
        is_off = isinstance(policy, Mapping) and set(policy) == {"name"}
        merged[key] = policy if name is None or is_off else {**merged.get(key, {}), **policy}
    return copy.deepcopy([*merged.values()])


# Path of a key -> function that merges its two values differently from other keys.
_SPECIAL: dict[KeyPath, Callable[[Any, Any], Any]] = {
    ("searcher",): _merge_typed("name", _SEARCHER_COMMON),
    ("checkpoint_storage",): _merge_typed("type", _STORAGE_COMMON),
    ("min_validation_period",): _replaced,
    ("min_checkpoint_period",): _replaced,
    ("labels",): _merge_lists_by(_itself),
    ("environment", "proxy_ports"): _merge_lists_by(_proxy_port),
    ("environment", "environment_variables"): joined_variables,
    ("environment", "image"): _image,
    ("log_policies",): merge_policies,
}
