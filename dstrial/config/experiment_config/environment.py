"""Check a config's environment variables and images for each kind of device.

Source: Determined 0.38.1 schemas/expconf/v0 and schemas/test_cases/v0/defaults.yaml.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dstrial.config.diagnostics import Diagnostics, KeyPath, render

INTERPRETER_VARIABLE = "DET_PYTHON_EXECUTABLE"
# Variables of Determined that users may set for their trials.
_FREE_DET_VARIABLES = (INTERPRETER_VARIABLE, "DET_DEBUG", "DET_RETRY_CONFIG", "DET_SKIP_PIP_INSTALL")
DEVICES = ("cpu", "cuda", "rocm")
_GPU_ALIAS = "gpu"  # Determined's old name of "cuda"
_KINDS = (*DEVICES, _GPU_ALIAS)


def by_device(given: Any) -> dict[str, Any]:
    """Return a config value as a mapping of device kind -> value.

    ``given`` is either such a mapping or one value for all device kinds. Null values in a mapping are left out; its key ``gpu``
    becomes ``cuda``.
    """
    if not isinstance(given, Mapping):
        return dict.fromkeys(DEVICES, given)
    values = {key: value for key, value in given.items() if value is not None}
    alias = values.pop(_GPU_ALIAS, None)
    return values if alias is None else {"cuda": alias, **values}


def joined_variables(first: Any, then: Any) -> Any:
    """Return the environment variables of ``first``, followed by those of ``then``.

    If both are lists, the result is a list; otherwise it maps device kind -> list. If ``first`` or ``then`` is invalid,
    ``then`` is returned unchanged.
    """
    if isinstance(first, list) and isinstance(then, list):
        return [*first, *then]
    if not isinstance(first, (list, Mapping)) or not isinstance(then, (list, Mapping)):
        return then
    if isinstance(then, Mapping) and (
        set(then) - set(_KINDS) or (then.get(_GPU_ALIAS) is not None and then.get("cuda") is not None)
    ):
        return then  # check_devices() reports the invalid value
    return {device: [*_listed(first, device), *_listed(then, device)] for device in DEVICES}


def _listed(given: Any, device: str) -> list[Any]:
    values = by_device(given).get(device, [])
    return values if isinstance(values, list) else [values]


def check_devices(given: Mapping[str, Any], path: KeyPath, findings: Diagnostics) -> None:
    """Record a problem for each unknown device kind, and for ``gpu`` beside ``cuda``."""
    for key in given:
        if key not in _KINDS:
            findings.problem(
                (*path, str(key)), "not a kind of device", "cpu, cuda (or gpu) or rocm", "Correct the name."
            )
    if given.get(_GPU_ALIAS) is not None and given.get("cuda") is not None:
        findings.problem((*path, _GPU_ALIAS), "given with cuda", "one of the two", "Move it to cuda.")


def images(given: Any, default: str) -> dict[str, Any]:
    """Return device kind -> container image; ``default`` for kinds without an image."""
    found = by_device(given)
    return {device: found.get(device) or default for device in DEVICES}


def check_environment(raw: dict[str, Any], findings: Diagnostics) -> dict[str, dict[str, str]]:
    """Return the environment variables of each device kind, as name -> value.

    ``raw`` is the config with defaults; its variables are replaced by one list per device kind (``cpu``, ``cuda``, ``rocm``).
    Invalid variables and kinds are recorded as problems.
    """
    for key in ("image", "environment_variables"):
        values = raw["environment"][key]
        if isinstance(values, Mapping):
            check_devices(values, ("environment", key), findings)
    given = raw["environment"]["environment_variables"]
    variables: dict[str, dict[str, str]] = {}
    for device in DEVICES:
        variables[device] = {}
        for index, entry in enumerate(_listed(given, device)):
            name, separator, text = str(entry).partition("=")
            if not isinstance(entry, str) or not separator or not name:
                inner = (device, index) if isinstance(given, Mapping) else (index,)
                path: KeyPath = ("environment", "environment_variables", *inner)
                findings.problem(path, render(entry), "NAME=value", "Write OMP_NUM_THREADS=4, for example.")
            else:
                variables[device][name] = text
    raw["environment"]["environment_variables"] = {
        device: [f"{name}={text}" for name, text in entries.items()] for device, entries in variables.items()
    }
    return variables


def check_variables(raw: Mapping[str, Any], findings: Diagnostics) -> None:
    """Record a problem for each variable that only the master may set.

    ``raw`` is the config after :func:`check_environment`.
    """
    by_kind = raw["environment"]["environment_variables"].values()
    for name in sorted({entry.partition("=")[0] for entries in by_kind for entry in entries}):
        if name.startswith("DET_") and name not in _FREE_DET_VARIABLES:
            findings.problem(
                "environment.environment_variables",
                f"{name}, a name that the master sets itself",
                f"names that do not begin with DET_, or one of {', '.join(_FREE_DET_VARIABLES)}",
                "Choose another name.",
            )
