"""Read values at keys such as ``data.dstrial``; apply ``--config key=value``."""

from __future__ import annotations

import copy
import dataclasses
import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dstrial.config.diagnostics import (
    OVERRIDE_LABEL,
    Diagnostics,
    KeyPath,
    dotted,
    key_path,
    nested_form,
)
from dstrial.config.documents import Document, check_value, parse_yaml_value
from dstrial.errors import ConfigError, ConfigProblem

# Hyperparameters that hold DeepSpeed settings; `<engine>_deepspeed_config` is a further one for each additional engine.
_HOLDERS = ("deepspeed_config", "overwrite_deepspeed_args")
# Sections in which users choose the keys.
_FREE = ("hyperparameters", "data")


def value_at(config: Any, path: str | KeyPath, default: Any = None) -> Any:
    """Return the value at a dotted key or path; ``default`` if there is none."""
    for part in key_path(path) if isinstance(path, str) else path:
        if not isinstance(config, Mapping) or part not in config:
            return default
        config = config[part]
    return config


def leaves(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yield (key path, value) of each leaf below ``path``; an empty mapping is a leaf."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from leaves(inner, (*path, key))
    else:
        yield path, value


def dstrial_section(config: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return ``data.dstrial`` of an experiment config; empty if it is no mapping."""
    section = value_at(config, "data.dstrial")
    return section if isinstance(section, Mapping) else {}


def count_in(section: Any, key: str) -> int | None:
    """Return the value at ``key`` if it is an integer of at least 1; otherwise None.

    The result is also None if ``section`` is not a mapping.
    """
    value = section.get(key) if isinstance(section, Mapping) else None
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 1 else None


def wants_system_metrics(config: Mapping[str, Any] | None) -> bool:
    return value_at(config, "profiling.enabled", False) is True


def check_dotted_names(hyperparameters: Mapping[str, Any], findings: Diagnostics) -> None:
    """Record a problem for each name such as ``overwrite_deepspeed_args.fp16``.

    DeepSpeed settings must be nested mappings; a dotted name would be a hyperparameter without effect.
    """
    for name, value in hyperparameters.items():
        first, dot, rest = name.partition(".")
        if dot and rest and first.endswith(_HOLDERS):
            findings.problem(
                ("hyperparameters", name),
                "one hyperparameter with dots in its name",
                "keys inside each other",
                f"Write {nested_form(name.split('.'), value)} instead.",
            )


def apply_overrides(document: Document, overrides: Sequence[str]) -> Document:
    """Return a copy of an experiment config with overrides from the command line.

    Each override is ``key=value``: a dotted key and a YAML value. ``1,2`` means the list ``[1,2]``. ``+key=value`` adds a key
    below ``hyperparameters`` or ``data`` that the file lacks.
    """
    if not overrides:
        return document
    value = copy.deepcopy(document.value) if document.value is not None else {}
    lines = dict(document.lines)
    problems: list[ConfigProblem] = []
    for override in overrides:
        key, separator, text = override.partition("=")
        is_new, key = key.startswith("+"), key.removeprefix("+")
        path = key_path(key)
        if not separator or not key or "" in path:
            fix = "Write --config hyperparameters.lr=0.1, for example."
            problems.append(ConfigProblem(OVERRIDE_LABEL, repr(override), "key=value with a dotted key", fix))
            continue
        try:
            parsed = _parse(text, f"{OVERRIDE_LABEL}: {key}")
        except ConfigError as error:
            problems += error.problems
            continue
        if is_new and path[0] not in _FREE:
            where, expected = f"{OVERRIDE_LABEL}: +{key}", f"a key below {' or '.join(_FREE)}"
            problems.append(ConfigProblem(where, "given with +", expected, f"Write --config {key}={text}."))
        elif not is_new and (problem := _unknown_key(value, path, document.label)) is not None:
            problems.append(problem)
        _set(value, path, parsed)
        lines = {known: line for known, line in lines.items() if known[: len(path)] != path}
        lines[path] = OVERRIDE_LABEL
    if problems:
        raise ConfigError(problems)
    check_value(value, f"{document.label} with {OVERRIDE_LABEL}")
    return dataclasses.replace(document, value=value, lines=lines)


def _unknown_key(config: Any, path: KeyPath, label: str) -> ConfigProblem | None:
    """Return a problem if ``hyperparameters`` or ``data`` has no key ``path``.

    Returns None for keys of other sections. Keys of dstrial, DeepSpeed and search spaces also give None: ``load_experiment``
    checks them. ``label`` names the config in the message.
    """
    section = value_at(config, path[:1])
    if len(path) < 2 or path[0] not in _FREE:
        return None
    known = section if isinstance(section, Mapping) else {}
    for depth in range(1, len(path)):
        part = path[depth]
        # Keys of dstrial, DeepSpeed and search spaces ("type") are checked later, with the config.
        if path[:2] == ("data", "dstrial") or str(part).endswith(_HOLDERS) or (depth > 1 and "type" in known):
            return None
        if part not in known:
            close = difflib.get_close_matches(str(part), [str(key) for key in known], n=1)
            instead = f"Write {dotted((*path[:depth], *close))}, or add" if close else "Add"
            return ConfigProblem(
                f"{OVERRIDE_LABEL}: {dotted(path)}",
                f"no key of {label}",
                f"one of {', '.join(map(str, known))}" if known else "a key of the file",
                f"{instead} it with --config +{dotted(path)}=VALUE.",
            )
        if not isinstance(known[part], Mapping):
            return None
        known = known[part]
    return None


def _parse(text: str, label: str) -> Any:
    if not text.startswith(("[", "{")) and "," in text:
        return [parse_yaml_value(part, label) for part in text.split(",")]
    return parse_yaml_value(text, label)


def _set(value: Any, path: KeyPath, new: Any) -> None:
    if not isinstance(value, dict):
        return
    for part in path[:-1]:
        if not isinstance(value.get(part), dict):
            value[part] = {}
        value = value[part]
    value[path[-1]] = new
