"""Check a config's keys, values and types against a table; fill in defaults."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import math
from collections.abc import Callable, Mapping
from typing import Any

from dstrial.config.auto_values import AutoValues
from dstrial.config.batch import AUTO
from dstrial.config.diagnostics import Diagnostics, KeyPath, dotted, nested_form, render

# Type in a `Rule` -> words for messages.
_WORDS = {
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
    "string": "a string",
    "list": "a list",
    "mapping": "a mapping",
    "null": "null",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """Rule of one config key: legal values, default, and texts for messages."""

    types: tuple[str, ...]  # keys of _WORDS, or "any"
    default: Any = None  # value of a missing key
    enum: tuple[Any, ...] | None = None  # the legal values; None if any value of the types is legal
    ignores_case: bool = False  # whether strings in `enum` match in any case
    minimum: float | None = None  # inclusive
    exclusive_minimum: float | None = None
    maximum: float | None = None  # inclusive
    exclusive_maximum: float | None = None
    section: Section | None = None  # nested keys, for a mapping that is checked
    items: Rule | None = None  # rule of each list item
    max_items: int | None = None
    # Returns the expected value as text, or None if the value is valid. Called with values of any type.
    check: Callable[[Any], str | None] | None = None
    expected: str = ""  # for messages; overrides the text derived from the fields above
    fix: str = ""  # for messages, a sentence with an example
    about: str = ""  # one clause for the reference page and for editors
    also: tuple[str, ...] = ()  # other legal spellings of the key
    replaced_by: str | None = None  # set if the key is deprecated; empty if it has no replacement


@dataclasses.dataclass(frozen=True, slots=True)
class Section:
    """The legal keys of one mapping, each with its rule."""

    keys: Mapping[str, Rule]
    # Whether the config's consumer rejects unknown keys and converts quoted numbers (DeepSpeed's pydantic models).
    strict: bool = False
    required: tuple[str, ...] = ()  # keys that must be given
    is_open: bool = False  # whether unknown keys are legal
    # Whether missing keys get defaults; otherwise the result is a copy of the input.
    fills_in: bool = True

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> Section:
        """Build a section from a JSON table in ``deepspeed_table.json``."""
        return cls({key: _rule_from_table(rule) for key, rule in table["keys"].items()}, table["strict"])


def _rule_from_table(table: Mapping[str, Any]) -> Rule:
    fields: dict[str, Any] = dict(table)
    for name in ("types", "also", "enum"):
        if name in fields:
            fields[name] = tuple(fields[name])
    if "section" in fields:
        fields["section"] = Section.from_table(fields["section"])
    return Rule(**fields)


@dataclasses.dataclass(frozen=True, slots=True)
class Dialect:
    """How a config's reader, such as DeepSpeed, treats null, "auto" and unknown keys."""

    name: str  # the consumer, for messages: "DeepSpeed 0.19.8"
    consequence: str = ""  # clause: the effect of an unknown key in a section that is not strict
    null_is_absent: bool = False  # whether null means a missing key
    auto: str = "value"  # "error" or "warning" for `"auto"`, "value" for an ordinary string
    filler: AutoValues | None = None  # replaces `"auto"`; if set, it overrides `auto`
    unknown_is_warning: bool = False  # whether an unknown key is a warning instead of a problem


def check_keys(
    section: Section, value: Mapping[str, Any], dialect: Dialect, findings: Diagnostics, path: KeyPath = ()
) -> dict[str, Any]:
    """Check a mapping by a section's rules; return it with defaults filled in.

    Problems at any depth are recorded in ``findings``. ``path`` is the mapping's key path in the document.

    Returns:
        A new mapping with every key of the table that is not deprecated: the value in ``value`` if legal, otherwise the
        default. Deprecated and unknown keys of ``value`` are included. Without ``section.fills_in``, a plain copy of ``value``.
    """
    spelled = {other: key for key, rule in section.keys.items() for other in (key, *rule.also)}
    effective: dict[str, Any] = {}
    for given_key, given in value.items():
        key = spelled.get(str(given_key))
        if key is None:
            effective[str(given_key)] = copy.deepcopy(given)
            if not section.is_open:
                _unknown_key(section, str(given_key), given, dialect, findings, path)
            continue
        if given is None and dialect.null_is_absent:
            continue
        rule = section.keys[key]
        inner = (*path, str(given_key))
        if rule.replaced_by is not None:
            instead = f"use {rule.replaced_by} instead" if rule.replaced_by else "remove it"
            findings.warn(inner, f"is deprecated in {dialect.name}; {instead}")
        accepted, checked = _check_value(rule, given, section, dialect, findings, inner)
        if accepted:
            effective[key] = checked
    for key in section.required:
        if value.get(key) is None and not (key in value and "any" in section.keys[key].types):
            rule = section.keys[key]
            findings.problem((*path, key), "not given", _expectation(rule), rule.fix or f"Add {key}.")
    if not section.fills_in:
        return copy.deepcopy(dict(value))
    for key, rule in section.keys.items():
        if key in effective or rule.replaced_by is not None:
            continue
        if rule.section is not None and rule.section.fills_in and "null" not in rule.types:
            effective[key] = check_keys(rule.section, {}, dialect, findings, (*path, key))
        else:
            effective[key] = copy.deepcopy(rule.default)
    return effective


def _unknown_key(
    section: Section, key: str, value: object, dialect: Dialect, findings: Diagnostics, path: KeyPath
) -> None:
    if key.startswith(("_", "//", "comment")) and dialect.consequence and not section.strict:
        return  # a comment key, which the consumer ignores
    inner = (*path, key)
    owner = dotted(path)
    scope = f"{owner} in {dialect.name}" if owner else dialect.name
    close = difflib.get_close_matches(key, section.keys, n=1, cutoff=0.7)
    fix = f"Write {close[0]} instead" if close else "Remove it"
    if "." in key:
        outer, *rest = key.split(".")
        known = difflib.get_close_matches(outer, section.keys, n=1, cutoff=0.7)
        fix = f"Write {nested_form([*(known or [outer]), *rest], value)} instead"
    note = f"; {dialect.consequence}" if dialect.consequence and not section.strict else ""
    if dialect.unknown_is_warning:
        findings.warn(inner, f"is not a key of {scope}{f'; did you mean {close[0]}?' if close else ''}")
    else:
        findings.problem(inner, f"not a key of {scope}", "one of its keys", f"{fix}{note}.")


def _check_value(
    rule: Rule, value: Any, section: Section, dialect: Dialect, findings: Diagnostics, path: KeyPath
) -> tuple[bool, Any]:
    """Return (whether the value is legal, the value with its defaults filled in).

    The problems of an illegal value are recorded in ``findings``. A string that was converted to another type causes a warning.
    """
    if (
        value == AUTO
        and dialect.auto != "value"
        and rule.default != AUTO
        and not (rule.enum and AUTO in rule.enum)
    ):
        return _check_auto(rule, section, dialect, findings, path)
    expected = rule.check(value) if rule.check is not None else None
    if expected is not None:
        findings.problem(path, render(value), expected, rule.fix or "Correct the value.")
        return False, None
    if isinstance(value, Mapping) and "mapping" in rule.types:
        if rule.section is not None:
            return True, check_keys(rule.section, value, dialect, findings, path)
        return True, copy.deepcopy(dict(value))
    if value is None and "null" in rule.types:
        return True, None
    is_whole_float = isinstance(value, float) and not {"number", "any"} & {*rule.types}
    if not _has_type(value, rule.types) or (is_whole_float and not section.fills_in):
        converted = _converted(value, rule.types) if section.strict else None
        if converted is None:
            findings.problem(path, render(value), _expectation(rule), _type_fix(value, rule))
            return False, None
        findings.warn(path, f"is {render(value)}; write it without quotes")
        value = converted
    if rule.enum is not None and not _in_enum(value, rule):
        close = difflib.get_close_matches(str(value), [str(item) for item in rule.enum], n=1)
        fix = f"Set it to {render(close[0])}." if close else "Set it to one of these."
        findings.problem(path, render(value), _expectation(rule), fix)
        return False, None
    if not _in_bounds(value, rule):
        fix = rule.fix or "Set it to a value in that range."
        findings.problem(path, render(value), _expectation(rule), fix)
        return False, None
    if isinstance(value, list) and rule.items is not None:
        if rule.max_items is not None and len(value) > rule.max_items:
            expected = f"at most {rule.max_items} items"
            findings.problem(path, f"a list of {len(value)}", expected, "Remove some.")
            return False, None
        checked = [
            _check_value(rule.items, item, section, dialect, findings, (*path, index))
            for index, item in enumerate(value)
        ]
        return all(accepted for accepted, _ in checked), [item for _, item in checked]
    if "integer" in rule.types and isinstance(value, float) and value.is_integer():
        value = int(value)
    return True, copy.deepcopy(value)


def _check_auto(
    rule: Rule, section: Section, dialect: Dialect, findings: Diagnostics, path: KeyPath
) -> tuple[bool, Any]:
    filler = dialect.filler
    if filler is not None and filler.fills_in(dotted(path)):
        return False, None
    if filler is None and section.strict:
        default = "" if rule.section is not None else f" ({render(rule.default)})"
        findings.warn(
            path, f'is "auto", which {dialect.name} takes as its default{default} unless a tool fills it in'
        )
    elif filler is None and dialect.auto == "warning":
        findings.warn(path, 'is "auto", which only another tool (Hugging Face Trainer) can fill in')
    else:
        nobody = (
            "nothing fills in for a DeepSpeedTrial" if filler is None else f"{filler.name} does not fill in"
        )
        removal = "" if path[-1] in section.required else ", or remove the key to take DeepSpeed's default"
        fix = f"Write the value itself{removal}."
        findings.problem(path, f'"auto", which {nobody}', _expectation(rule), fix)
    return False, None


def _has_type(value: object, types: tuple[str, ...]) -> bool:
    if "any" in types:
        return True
    if isinstance(value, bool):
        return "boolean" in types
    if isinstance(value, int):
        return "integer" in types or "number" in types
    if isinstance(value, float):
        return "number" in types or ("integer" in types and math.isfinite(value) and value.is_integer())
    if isinstance(value, str):
        return "string" in types
    if isinstance(value, (list, tuple)):
        return "list" in types
    return (value is None and "null" in types) or (isinstance(value, Mapping) and "mapping" in types)


def _converted(value: object, types: tuple[str, ...]) -> Any:
    """Convert a string such as ``"3"`` or ``"true"`` to a type in ``types``.

    0 and 1 are converted if ``types`` has ``boolean``. None is returned if the value cannot be converted.
    """
    if isinstance(value, str):
        if "boolean" in types and value.lower() in ("true", "false"):
            return value.lower() == "true"
        if "integer" in types or "number" in types:
            try:
                number = float(value)
            except ValueError:
                return None
            if "integer" not in types:
                return number
            return int(number) if math.isfinite(number) and number.is_integer() else None
    if "boolean" in types and isinstance(value, (int, float)) and value in (0, 1):
        return bool(value)
    return None


def _in_enum(value: object, rule: Rule) -> bool:
    values = rule.enum or ()
    if rule.ignores_case and isinstance(value, str):
        return value.lower() in {str(item).lower() for item in values}
    return any(value == item and isinstance(value, bool) == isinstance(item, bool) for item in values)


def _in_bounds(value: object, rule: Rule) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return True
    return (
        (rule.minimum is None or value >= rule.minimum)
        and (rule.exclusive_minimum is None or value > rule.exclusive_minimum)
        and (rule.maximum is None or value <= rule.maximum)
        and (rule.exclusive_maximum is None or value < rule.exclusive_maximum)
    )


def _expectation(rule: Rule) -> str:
    if rule.expected:
        return rule.expected
    if rule.enum is not None:
        return f"one of {', '.join(render(item) for item in rule.enum)}"
    text = " or ".join(_WORDS[name] for name in rule.types if name in _WORDS) or "a value"
    bounds = [
        f"{word} {render(bound)}"
        for word, bound in (
            ("of at least", rule.minimum),
            ("above", rule.exclusive_minimum),
            ("of at most", rule.maximum),
            ("below", rule.exclusive_maximum),
        )
        if bound is not None
    ]
    return f"{text} {' and '.join(bounds)}" if bounds else text


def _type_fix(value: object, rule: Rule) -> str:
    if isinstance(value, str):
        converted = _converted(value, rule.types)
        if converted is not None:
            return f"Write {render(converted)} without quotes."
    if isinstance(value, float) and value.is_integer() and "integer" in rule.types:
        return f"Write {int(value)}, without a decimal point."
    return rule.fix or "Write a value of that type."


_JSON_TYPES = {"list": "array", "mapping": "object"}
_JSON_BOUNDS = {
    "minimum": "minimum",
    "maximum": "maximum",
    "exclusive_minimum": "exclusiveMinimum",
    "exclusive_maximum": "exclusiveMaximum",
    "max_items": "maxItems",
}


def json_schema(section: Section, title: str) -> dict[str, Any]:
    """Return the JSON Schema with which editors complete and check a section."""
    draft = "https://json-schema.org/draft/2020-12/schema"
    return {"$schema": draft, "title": title, "type": "object", **_json_keys(section)}


def _json_keys(section: Section) -> dict[str, Any]:
    return {
        "properties": {key: _json_value(rule) for key, rule in section.keys.items()},
        "additionalProperties": section.is_open,
        "required": list(section.required),
    }


def _json_value(rule: Rule) -> dict[str, Any]:
    schema: dict[str, Any] = {"description": rule.about} if rule.about else {}
    if "any" not in rule.types:
        # Null means that the key is missing.
        types = {*rule.types, "null"}
        schema["type"] = sorted(_JSON_TYPES.get(name, name) for name in types)
    if rule.enum is not None:
        schema["enum"] = [*rule.enum, None]
    for field, keyword in _JSON_BOUNDS.items():
        if getattr(rule, field) is not None:
            schema[keyword] = getattr(rule, field)
    if rule.default is not None:
        schema["default"] = rule.default
    if rule.section is not None:
        schema |= _json_keys(rule.section)
    if rule.items is not None:
        schema["items"] = _json_value(rule.items)
    return schema
