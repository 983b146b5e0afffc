"""Convert tables of config keys to JSON Schemas, for editors and reference pages."""

from __future__ import annotations

from typing import Any

from dstrial.config.keys import Rule, Section
from dstrial.config.schema import EXPERIMENT

_TYPES = {"list": "array", "mapping": "object"}
_BOUNDS = {
    "minimum": "minimum",
    "maximum": "maximum",
    "exclusive_minimum": "exclusiveMinimum",
    "exclusive_maximum": "exclusiveMaximum",
    "max_items": "maxItems",
}


def experiment_schema() -> dict[str, Any]:
    """Return the JSON Schema of an experiment config: keys, types, bounds, defaults."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Experiment config of Determined and dstrial",
        "type": "object",
        **schema_of(EXPERIMENT),
    }


def schema_of(section: Section) -> dict[str, Any]:
    """Return the JSON Schema of one table."""
    return {
        "properties": {key: _value(rule) for key, rule in section.keys.items()},
        "additionalProperties": section.is_open,
        "required": list(section.required),
    }


def _value(rule: Rule) -> dict[str, Any]:
    schema: dict[str, Any] = {"description": rule.about} if rule.about else {}
    if "any" not in rule.types:
        # Null means that the key is missing.
        types = {*rule.types, "null", *(["string"] if rule.parse is not None else [])}
        schema["type"] = sorted(_TYPES.get(name, name) for name in types)
    if rule.enum is not None:
        schema["enum"] = [*rule.enum, None]
    for field, keyword in _BOUNDS.items():
        if getattr(rule, field) is not None:
            schema[keyword] = getattr(rule, field)
    if rule.default is not None:
        schema["default"] = rule.default
    if rule.section is not None:
        schema |= schema_of(rule.section)
    if rule.items is not None:
        schema["items"] = _value(rule.items)
    return schema
