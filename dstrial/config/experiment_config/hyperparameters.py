"""Hyperparameters: check their shapes, and give one trial concrete values.

A value that is no mapping is a constant; a mapping without ``type`` is nested; a mapping with ``type`` is ``const``, or a
search space (``int``, ``double``, ``log``, ``categorical``).
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping
from typing import Any

from dstrial.config.diagnostics import Diagnostics, KeyPath, dotted, render

DEEPSPEED_KEYS = ("deepspeed_config", "overwrite_deepspeed_args")
"""Hyperparameters that hold DeepSpeed settings, where a ``type`` may be an optimizer's."""

_FIELDS: dict[str, tuple[set[str], set[str]]] = {
    "const": ({"val"}, set()),
    "int": ({"minval", "maxval"}, {"count"}),
    "double": ({"minval", "maxval"}, {"count"}),
    "log": ({"minval", "maxval", "base"}, {"count"}),
    "categorical": ({"vals"}, set()),
}
"""Required and optional fields of each type, besides ``type``."""


def concrete_values(
    hyperparameters: Mapping[str, Any],
    findings: Diagnostics,
    *,
    require_concrete: bool,
    needs_counts: bool,
    path: KeyPath = ("hyperparameters",),
) -> dict[str, Any]:
    """Return the values that one trial sees.

    With ``require_concrete`` every search space is a problem; otherwise it gives its middle (numbers) or first value
    (categorical), with a warning. ``needs_counts``: numbers need a ``count``, as for the grid searcher. ``path`` is the
    mapping's own.

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
    """Return the form that a Determined trial reads: ``{type: const, val: …}``."""
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
    """Say whether a mapping is one hyperparameter rather than a group of them."""
    # Below DeepSpeed settings a `type` may be an optimizer's.
    if "type" not in spec:
        return False
    return _is_known(spec["type"]) or not set(path) & set(DEEPSPEED_KEYS)


def is_searched(hyperparameters: Mapping[str, Any]) -> bool:
    """Say whether trials may differ: whether any hyperparameter is no constant."""
    return next(searched_values(hyperparameters, {}), None) is not None


def searched_values(
    hyperparameters: Mapping[str, Any], values: Any, path: KeyPath = ("hyperparameters",)
) -> Iterator[tuple[KeyPath, Any]]:
    """Yield path and value (None if missing) of each hyperparameter that varies."""
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
    """Say whether ``type`` is a hyperparameter's and not, say, an optimizer's."""
    # Normalised, an optimizer's `type` is a mapping itself.
    return isinstance(kind, str) and kind in _FIELDS


def _check_spec(spec: Mapping[str, Any], findings: Diagnostics, path: KeyPath, *, needs_counts: bool) -> bool:
    kind = spec["type"]
    if not _is_known(kind):
        close = difflib.get_close_matches(str(kind), _FIELDS, n=1)
        fix = f"Set it to {close[0]}." if close else "Rename the key if this is a group of hyperparameters."
        findings.problem((*path, "type"), render(kind), f"one of {', '.join(_FIELDS)}", fix)
        return False
    required, optional = _FIELDS[kind]
    before = len(findings.problems)
    for field in sorted(required - set(spec)):
        findings.problem((*path, field), "not given", f"a value, because type is {kind}", f"Add {field}.")
    for field in sorted(set(spec) - required - optional - {"type"}):
        known = sorted(required | optional)
        close = difflib.get_close_matches(str(field), known, n=1)
        fix = f"Write {close[0]} instead." if close else "Remove it."
        findings.problem((*path, field), f"not a field of {kind}", f"one of {', '.join(known)}", fix)
    if len(findings.problems) > before:
        return False
    if kind == "categorical":
        if not isinstance(spec["vals"], list) or not spec["vals"]:
            findings.problem(
                (*path, "vals"), render(spec["vals"]), "a list with at least one value", "List the values."
            )
            return False
    elif kind != "const":
        _check_range(spec, findings, path, needs_counts=needs_counts)
    return len(findings.problems) == before


def _check_range(
    spec: Mapping[str, Any], findings: Diagnostics, path: KeyPath, *, needs_counts: bool
) -> None:
    kind = spec["type"]
    word = "an integer" if kind == "int" else "a number"
    accepted: tuple[type, ...] = (int,) if kind == "int" else (int, float)
    bounds_are_numbers = True
    for field in ("minval", "maxval", *(["base"] if kind == "log" else [])):
        if isinstance(spec[field], bool) or not isinstance(spec[field], accepted):
            findings.problem((*path, field), render(spec[field]), word, "Write a number.")
            bounds_are_numbers = False
        elif not _is_in_range(spec[field], kind):
            findings.problem(
                (*path, field),
                render(spec[field]),
                "an integer of 64 bits" if kind == "int" else "a finite number",
                "Write another one.",
            )
            bounds_are_numbers = False
    if bounds_are_numbers and spec["minval"] >= spec["maxval"]:
        findings.problem(
            (*path, "minval"),
            render(spec["minval"]),
            f"less than maxval ({spec['maxval']})",
            "Exchange the two.",
        )
    if bounds_are_numbers and kind == "log" and spec["base"] <= 0:
        findings.problem((*path, "base"), render(spec["base"]), "a number above 0", "Set it to 10.")
    elif bounds_are_numbers and kind == "log":
        for field in ("minval", "maxval"):
            if not _is_finite_power(spec["base"], spec[field]):
                findings.problem(
                    (*path, field),
                    f"{render(spec[field])}, and {render(spec['base'])} to the power of it is too large for a float",
                    "an exponent of the base",
                    "Write the exponent, -4 for a base of 10 and a lowest value of 0.0001 for example.",
                )
    count = spec.get("count")
    if count is None:
        if needs_counts:
            fix = "Add count, the number of grid points on this axis."
            findings.problem(
                (*path, "count"), "not given", "an integer of at least 1 for the grid searcher", fix
            )
    elif isinstance(count, bool) or not isinstance(count, int) or count < 1:
        findings.problem((*path, "count"), render(count), "an integer of at least 1", "Set it to 1 or more.")


def _is_in_range(bound: float, kind: str) -> bool:
    if kind == "int":
        return -(2**63) <= bound < 2**63
    try:
        return math.isfinite(bound)
    except OverflowError:
        return False


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
