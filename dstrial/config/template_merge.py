"""Lay an experiment config over a template, field by field: what the config gives wins.

Source: Determined 0.38.1, schemas/test_cases/v0/merging.yaml and the merge rules of its configs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeAlias

from dstrial.config.devices import DEVICES, of_device, with_new_names
from dstrial.config.hyperparameters import is_specification

_SEARCHER_COMMON = ("metric", "smaller_is_better", "source_trial_id", "source_checkpoint_uuid")
_STORAGE_COMMON = ("save_experiment_best", "save_trial_best", "save_trial_latest")

Path: TypeAlias = "tuple[str, ...]"


def merge_template(template: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with a template's fields where it gives none; null counts as not given.

    Mappings are merged at every depth. Exceptions: labels are united; bind mounts, devices and proxy ports of the template
    are added where the config uses their container path or port for nothing else; environment variables of the template come
    before the config's; log policies are merged by name; a hyperparameter is taken whole, unless both are nested mappings; of
    another searcher or storage only the fields that all of them have are taken; a period is one, never a blend of two units.

    Args:
        template: part of an experiment config, not checked.
        config: part of an experiment config, not checked; neither is changed.
    """
    return _mapping(template, config, ())


def _mapping(base: Mapping[str, Any], over: Mapping[str, Any], path: Path) -> dict[str, Any]:
    merged = {key: copy.deepcopy(value) for key, value in base.items()}
    for key, value in over.items():
        below = merged.get(key)
        if value is None and key in merged and path[:1] != ("hyperparameters",):
            continue
        merged[key] = copy.deepcopy(value) if below is None else _value(below, value, (*path, str(key)))
    return merged


def _value(base: Any, over: Any, path: Path) -> Any:
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


def _is_nested(value: Any, path: Path) -> bool:
    return isinstance(value, Mapping) and not is_specification(value, path)


def _whole(_base: Any, over: Any) -> Any:
    return copy.deepcopy(over)


def _union_of(kind: str, common: Sequence[str]) -> Callable[[Any, Any], Any]:
    """Return the rule of a section whose fields depend on one of them, ``kind``."""

    def merge(base: Any, over: Any) -> Any:
        if not isinstance(base, Mapping) or not isinstance(over, Mapping):
            return copy.deepcopy(over)
        wanted = over.get(kind)
        if wanted is not None and base.get(kind) not in (None, wanted):
            base = {key: base[key] for key in common if key in base}
        return _shallow(base, over)

    return merge


def _shallow(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of both, those of ``over`` first, none of them blended."""
    given = {key: value for key, value in over.items() if value is not None or key not in base}
    return copy.deepcopy({**base, **given})


def _united(base: Any, over: Any) -> Any:
    if not isinstance(base, list) or not isinstance(over, list):
        return copy.deepcopy(over)
    there = {_frozen(item) for item in over}
    return [*over, *(item for item in base if _frozen(item) not in there)]


def _frozen(item: Any) -> Hashable:
    """Return what is equal where items are, to be looked up: two long lists are not compared each with each."""
    if isinstance(item, Mapping):
        return frozenset((key, _frozen(value)) for key, value in item.items())
    return tuple(_frozen(one) for one in item) if isinstance(item, list) else item


def _by(name: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    """Return the rule of a list whose items are told apart by what ``name`` finds in them."""

    def merge(base: Any, over: Any) -> Any:
        if not isinstance(base, list) or not isinstance(over, list):
            return copy.deepcopy(over)
        taken = {_frozen(name(item)) for item in over}
        return copy.deepcopy([*over, *(item for item in base if _frozen(name(item)) not in taken)])

    return merge


def _container_path(item: Any) -> Any:
    """Return where a mount or device appears: the field, or the second part of ``host:container[:mode]``."""
    if isinstance(item, Mapping):
        return item.get("container_path")
    return item.split(":")[1] if isinstance(item, str) and ":" in item else item


def _proxy_port(item: Any) -> Any:
    return item.get("proxy_port") if isinstance(item, Mapping) else item


def _variables(base: Any, over: Any) -> Any:
    """Return the variables of both, one list per device unless both are lists; a later assignment wins."""
    if isinstance(base, list) and isinstance(over, list):
        return [*base, *over]
    if not isinstance(base, (list, Mapping)) or not isinstance(over, (list, Mapping)):
        return copy.deepcopy(over)
    return {device: [*_of_device(base, device), *_of_device(over, device)] for device in DEVICES}


def _of_device(given: Any, device: str) -> list[Any]:
    values = of_device(given, device) if isinstance(given, Mapping) else given
    if values is None:
        return []
    return list(values) if isinstance(values, list) else [values]


def _image(base: Any, over: Any) -> Any:
    """Return the image of each device; a text stands for all of them."""
    if isinstance(over, Mapping):
        below = with_new_names(base) if isinstance(base, Mapping) else dict.fromkeys(DEVICES, base)
        return _shallow(below, with_new_names(over))
    return over


def _policies(base: Any, over: Any) -> Any:
    if not isinstance(base, list) or not isinstance(over, list):
        return copy.deepcopy(over)
    named = {_frozen(_name(item)): item for item in reversed(base) if _name(item) is not None}
    merged = []
    for policy in over:
        below = named.get(_frozen(_name(policy)))
        is_off = isinstance(policy, Mapping) and set(policy) == {"name"}
        merged.append(policy if below is None or is_off else {**below, **policy})
    names, there = {_frozen(_name(policy)) for policy in over}, {_frozen(policy) for policy in over}
    merged += [
        item
        for item in base
        if (_name(item) is None or _frozen(_name(item)) not in names) and _frozen(item) not in there
    ]
    return copy.deepcopy(merged)


def _name(policy: Any) -> Any:
    return policy.get("name") if isinstance(policy, Mapping) else None


_SPECIAL: dict[Path, Callable[[Any, Any], Any]] = {
    ("searcher",): _union_of("name", _SEARCHER_COMMON),
    ("checkpoint_storage",): _union_of("type", _STORAGE_COMMON),
    ("data_layer",): _union_of("type", ()),
    ("tensorboard_storage",): _union_of("type", ()),
    ("min_validation_period",): _whole,
    ("min_checkpoint_period",): _whole,
    ("labels",): _united,
    ("bind_mounts",): _by(_container_path),
    ("resources", "devices"): _by(_container_path),
    ("environment", "proxy_ports"): _by(_proxy_port),
    ("environment", "environment_variables"): _variables,
    ("environment", "image"): _image,
    ("log_policies",): _policies,
}
