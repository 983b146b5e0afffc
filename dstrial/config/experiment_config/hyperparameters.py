"""Check the specifications of hyperparameters, and choose values for one trial.

A value that is not a mapping is a constant. A mapping without ``type`` is a group; with ``type`` it is ``const`` or a search
space (``int``, ``double``, ``log``, ``categorical``).
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterator, Mapping
from typing import Any

from dstrial.config.diagnostics import Diagnostics, KeyPath, dotted, render
from dstrial.config.keys import Rule, Section, check_keys
from dstrial.config.schema import DIALECT

DEEPSPEED_KEYS = ("deepspeed_config", "overwrite_deepspeed_args")
"""Hyperparameters with DeepSpeed settings, in which a key ``type`` may be an optimizer's type."""


def _check_int(value: Any) -> str | None:
    is_int = isinstance(value, int) and not isinstance(value, bool)
    return None if is_int and -(2**63) <= value < 2**63 else "an integer of 64 bits"


def _check_values(value: Any) -> str | None:
    return None if isinstance(value, list) and value else "a list with at least one value"


def _range(bound: Rule, **more: Rule) -> Section:
    count = Rule(("integer",), minimum=1, fix="Add count, the number of grid points on this axis.")
    return Section({"minval": bound, "maxval": bound, **more, "count": count}, required=("minval", "maxval"))


_NUMBER = Rule(("number",))
_BASE = Rule(("number",), exclusive_minimum=0, expected="a number above 0", fix="Set it to 10.")
_KINDS: dict[str, Section] = {
    "const": Section({"val": Rule(("any",))}, required=("val",)),
    "int": _range(Rule(("integer",), check=_check_int)),
    "double": _range(_NUMBER),
    "log": dataclasses.replace(_range(_NUMBER, base=_BASE), required=("minval", "maxval", "base")),
    "categorical": Section(
        {"vals": Rule(("list",), check=_check_values, fix="List the values.")}, required=("vals",)
    ),
}
"""Type of a hyperparameter -> the other fields of its specification."""


def concrete_values(
    hyperparameters: Mapping[str, Any],
    findings: Diagnostics,
    *,
    require_concrete: bool,
    needs_counts: bool,
    path: KeyPath = ("hyperparameters",),
) -> dict[str, Any]:
    """Return one value for each hyperparameter, as for one trial.

    With ``require_concrete`` every search space is an error. Otherwise the middle of a range or the first categorical value is
    used, with a warning. ``needs_counts``: numeric ranges need a ``count``, as for the grid searcher. ``path`` is the key path
    of ``hyperparameters``.

    Source: Determined 0.38.1 schemas/expconf/v0/hyperparameter*.json.
    """
    values: dict[str, Any] = {}
    for name, spec in hyperparameters.items():
        inner = (*path, str(name))
        if not isinstance(spec, Mapping):
            values[str(name)] = spec
        elif not is_specification(spec, inner):
            values[str(name)] = concrete_values(
                spec, findings, require_concrete=require_concrete, needs_counts=needs_counts, path=inner
            )
        elif _check_spec(spec, findings, inner, needs_counts=needs_counts):
            if spec["type"] == "const":
                values[str(name)] = spec["val"]
                continue
            values[str(name)] = sample = _sample(spec)
            if require_concrete:
                fix = f"Pass --config {dotted(inner)}={render(sample).strip(chr(34))}, or write one value into the file."
                findings.problem(
                    inner, f"a search space ({spec['type']})", "one value, because one trial runs", fix
                )
            else:
                findings.warn(
                    inner, f"is a search space ({spec['type']}); checked with {render(sample)} only"
                )
    return values


def normalised_specs(
    hyperparameters: Mapping[str, Any], path: KeyPath = ("hyperparameters",)
) -> dict[str, Any]:
    """Return hyperparameters in Determined's full form: ``{type: const, val: …}``."""
    specs: dict[str, Any] = {}
    for name, spec in hyperparameters.items():
        inner = (*path, str(name))
        if not isinstance(spec, Mapping):
            specs[str(name)] = {"type": "const", "val": spec}
        elif is_specification(spec, inner):
            specs[str(name)] = dict(spec)
        else:
            specs[str(name)] = normalised_specs(spec, inner)
    return specs


def is_specification(spec: Mapping[str, Any], path: KeyPath) -> bool:
    """Return whether a mapping specifies one hyperparameter rather than a group."""
    # In DeepSpeed settings, `type` may be an optimizer's type.
    if "type" not in spec:
        return False
    return _is_known(spec["type"]) or not set(path) & set(DEEPSPEED_KEYS)


def is_searched(hyperparameters: Mapping[str, Any]) -> bool:
    """Return whether any hyperparameter is a search space."""
    return next(searched_values(hyperparameters, {}), None) is not None


def searched_values(
    hyperparameters: Mapping[str, Any], values: Any, path: KeyPath = ("hyperparameters",)
) -> Iterator[tuple[KeyPath, Any]]:
    """Yield (path, value) of each searched hyperparameter; a missing value is None."""
    for name, spec in hyperparameters.items():
        inner = (*path, str(name))
        if not isinstance(spec, Mapping):
            continue
        value = values.get(name) if isinstance(values, Mapping) else None
        if not is_specification(spec, inner):
            yield from searched_values(spec, value, inner)
        elif spec["type"] != "const":
            yield inner[1:], value


def _is_known(kind: object) -> bool:
    """Return whether ``kind`` is a hyperparameter type, not an optimizer type."""
    # In the full form, an optimizer's `type` is itself a mapping.
    return isinstance(kind, str) and kind in _KINDS


def _check_spec(spec: Mapping[str, Any], findings: Diagnostics, path: KeyPath, *, needs_counts: bool) -> bool:
    kind = spec["type"]
    if not _is_known(kind):
        close = difflib.get_close_matches(str(kind), _KINDS, n=1)
        fix = f"Set it to {close[0]}." if close else "Rename the key if this is a group of hyperparameters."
        findings.problem((*path, "type"), render(kind), f"one of {', '.join(_KINDS)}", fix)
        return False
    before = len(findings.problems)
    section = _KINDS[kind]
    if needs_counts and "count" in section.keys:
        section = dataclasses.replace(section, required=(*section.required, "count"))
    fields = {field: value for field, value in spec.items() if field != "type"}
    check_keys(section, fields, DIALECT, findings, path)
    if len(findings.problems) == before and "minval" in section.keys:
        _check_range(spec, findings, path)
    return len(findings.problems) == before


def _check_range(spec: Mapping[str, Any], findings: Diagnostics, path: KeyPath) -> None:
    low, high = spec["minval"], spec["maxval"]
    if low >= high:
        findings.problem((*path, "minval"), render(low), f"less than maxval ({high})", "Exchange the two.")
    for field in ("minval", "maxval") if spec["type"] == "log" else ():
        if not _is_finite_power(spec["base"], spec[field]):
            findings.problem(
                (*path, field),
                f"{render(spec[field])}, and {render(spec['base'])} to the power of it is too large for a float",
                "an exponent of the base",
                "Write the exponent, -4 for a base of 10 and a lowest value of 0.0001 for example.",
            )


def _is_finite_power(base: float, exponent: float) -> bool:
    try:
        return math.isfinite(float(base) ** exponent)
    except OverflowError:
        return False


def _sample(spec: Mapping[str, Any]) -> Any:
    """Return one value of a search space: the middle of a range, the first of a list."""
    if spec["type"] == "categorical":
        return spec["vals"][0]
    middle = (spec["minval"] + spec["maxval"]) / 2
    if spec["type"] == "int":
        return (spec["minval"] + spec["maxval"]) // 2
    return float(spec["base"] ** middle) if spec["type"] == "log" else middle
