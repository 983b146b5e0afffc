"""Check the specifications of hyperparameters, and choose values for one trial.

A value that is not a mapping is a constant. A mapping without ``type`` is a group; with ``type`` it is ``const`` or a search
space (``int``, ``double``, ``log``, ``categorical``).
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dstrial.config.diagnostics import Diagnostics, KeyPath, dotted, render
from dstrial.config.dotted_keys import value_at
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

_ROOT: KeyPath = ("hyperparameters",)


def concrete_values(
    hyperparameters: Mapping[str, Any], findings: Diagnostics, *, require_concrete: bool, needs_counts: bool
) -> dict[str, Any]:
    """Return hyperparameters with one value in place of each search space.

    Constants ``{type: const, val: …}`` become their values. Invalid hyperparameters are left out and recorded as problems.

    A search space becomes the middle of its numeric range, or the first value of its categorical list. Each search space is
    recorded as a problem with ``require_concrete``, otherwise as a warning. With ``needs_counts``, as for the grid searcher, a
    numeric range without a ``count`` is invalid. Source: Determined 0.38.1 schemas/expconf/v0/hyperparameter*.json.
    """

    def value_of(spec: Any, path: KeyPath) -> Any:
        if not isinstance(spec, Mapping):
            return spec
        if not _check_spec(spec, findings, path, needs_counts=needs_counts):
            return _ABSENT
        if spec["type"] == "const":
            return spec["val"]
        sample = _sample(spec)
        if require_concrete:
            given = f"{dotted(path)}={render(sample).strip(chr(34))}"
            fix = f"Pass --config {given}, or write one value into the file."
            findings.problem(
                path, f"a search space ({spec['type']})", "one value, because one trial runs", fix
            )
        else:
            findings.warn(path, f"is a search space ({spec['type']}); checked with {render(sample)} only")
        return sample

    return _converted(hyperparameters, _ROOT, value_of)


def normalised_specs(hyperparameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return hyperparameters in Determined's full form: ``{type: const, val: …}``."""

    def spec_of(spec: Any, _path: KeyPath) -> dict[str, Any]:
        return dict(spec) if isinstance(spec, Mapping) else {"type": "const", "val": spec}

    return _converted(hyperparameters, _ROOT, spec_of)


_ABSENT = object()


def _converted(
    group: Mapping[str, Any], path: KeyPath, convert: Callable[[Any, KeyPath], Any]
) -> dict[str, Any]:
    """Return a group of hyperparameters with ``convert(value, path)`` applied to each.

    Nested groups are converted too. Hyperparameters for which ``convert`` returns ``_ABSENT`` are left out.
    """
    values: dict[str, Any] = {}
    for name, spec in group.items():
        inner = (*path, str(name))
        is_group = isinstance(spec, Mapping) and not is_specification(spec, inner)
        value = _converted(spec, inner, convert) if is_group else convert(spec, inner)
        if value is not _ABSENT:
            values[str(name)] = value
    return values


def specifications(
    hyperparameters: Mapping[str, Any], path: KeyPath = _ROOT
) -> Iterator[tuple[KeyPath, Mapping[str, Any]]]:
    """Yield (path, specification) of each hyperparameter written as ``{type: …}``."""
    for name, spec in hyperparameters.items():
        inner = (*path, str(name))
        if isinstance(spec, Mapping):
            yield from ([(inner, spec)] if is_specification(spec, inner) else specifications(spec, inner))


def is_specification(spec: Mapping[str, Any], path: KeyPath) -> bool:
    """Return whether a mapping is one hyperparameter's ``{type: …}``, not a group.

    ``path`` is the mapping's key path. Below DeepSpeed settings, a mapping with an unknown ``type`` is a group.
    """
    # In DeepSpeed settings, `type` may be an optimizer's type.
    if "type" not in spec:
        return False
    return _is_known(spec["type"]) or not set(path) & set(DEEPSPEED_KEYS)


def is_searched(hyperparameters: Mapping[str, Any]) -> bool:
    """Return whether any hyperparameter is a search space."""
    return any(spec["type"] != "const" for _, spec in specifications(hyperparameters))


def searched_values(hyperparameters: Mapping[str, Any], values: Any) -> Iterator[tuple[KeyPath, Any]]:
    """Yield (path, value in a trial) of each hyperparameter that is a search space.

    ``values`` are the trial's hyperparameters; a missing value is None. Paths begin below ``hyperparameters``.
    """
    for path, spec in specifications(hyperparameters):
        if spec["type"] != "const":
            yield path[1:], value_at(values, path[1:])


def _is_known(kind: object) -> bool:
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
    if spec["type"] == "categorical":
        return spec["vals"][0]
    middle = (spec["minval"] + spec["maxval"]) / 2
    if spec["type"] == "int":
        return (spec["minval"] + spec["maxval"]) // 2
    return float(spec["base"] ** middle) if spec["type"] == "log" else middle
