"""Apply ``--config key=value`` to an experiment config, as Determined's client does."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

from dstrial.config.documents import Document, parse_yaml_value
from dstrial.config.findings import OVERRIDE_LABEL, KeyPath, key_path
from dstrial.config.limits import check_value
from dstrial.errors import ConfigError, ConfigProblem


def apply_overrides(document: Document, overrides: Sequence[str]) -> Document:
    """Return the document with values from the command line put into it.

    Args:
        document: a parsed experiment config; not changed.
        overrides: ``key=value`` each; the key is dotted, the value is YAML. A value with commas outside
            brackets is a list.

    Raises:
        ConfigError: an override has no ``=``, an empty key part, or a value that is not YAML.
    """
    if not overrides:
        return document
    value = copy.deepcopy(document.value) if document.value is not None else {}
    lines = dict(document.lines)
    problems: list[ConfigProblem] = []
    for override in overrides:
        key, separator, text = override.partition("=")
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
        _set(value, path, parsed)
        lines = {known: line for known, line in lines.items() if known[: len(path)] != path}
        lines[path] = OVERRIDE_LABEL
    if problems:
        raise ConfigError(problems)
    check_value(value, f"{document.label} with {OVERRIDE_LABEL}")
    return dataclasses.replace(document, value=value, lines=lines)


def _parse(text: str, label: str) -> Any:
    if not text.startswith(("[", "{")) and "," in text:
        return [parse_yaml_value(part, label) for part in text.split(",")]
    return parse_yaml_value(text, label)


def _set(value: Any, path: KeyPath, new: Any) -> None:
    """Set a key in place, making mappings on the way and replacing whatever is none."""
    if not isinstance(value, dict):
        return
    for part in path[:-1]:
        if not isinstance(value.get(part), dict):
            value[part] = {}
        value = value[part]
    value[path[-1]] = new
