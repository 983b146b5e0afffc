"""Complete a config's environment variables and images for each kind of device.

Source: Determined 0.38.1 schemas/expconf/v0 and schemas/test_cases/v0/defaults.yaml.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dstrial.config.diagnostics import Diagnostics, KeyPath, render

INTERPRETER_VARIABLE = "DET_PYTHON_EXECUTABLE"
# Variables of Determined that users may set for their trials.
_FREE_DET_VARIABLES = (INTERPRETER_VARIABLE, "DET_DEBUG", "DET_RETRY_CONFIG", "DET_SKIP_PIP_INSTALL")
DEVICES = ("cpu", "cuda", "rocm")
_GPU_ALIAS = "gpu"


def of_device(given: Mapping[str, Any], device: str) -> Any:
    """Return the value for a kind of device, or None; ``gpu`` counts as ``cuda``."""
    value = given.get(device)
    return given.get(_GPU_ALIAS) if value is None and device == "cuda" else value


def add_variables(environment: dict[str, Any], variables: Sequence[str]) -> None:
    """Prepend variables to a config's ``environment_variables`` of each device kind."""
    given = environment.get("environment_variables") or []
    if isinstance(given, Mapping):
        given = {device: [*variables, *(of_device(given, device) or [])] for device in DEVICES}
    elif isinstance(given, list):
        given = [*variables, *given]
    environment["environment_variables"] = given


def with_new_names(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a mapping with the key ``gpu`` renamed to ``cuda``."""
    renamed = {key: value for key, value in given.items() if key != _GPU_ALIAS}
    if _GPU_ALIAS in given:
        renamed["cuda"] = of_device(given, "cuda")
    return renamed


def check_devices(given: Mapping[str, Any], path: KeyPath, findings: Diagnostics) -> None:
    """Record unknown kinds of device, and ``gpu`` given together with ``cuda``."""
    for key in given:
        if key not in (*DEVICES, _GPU_ALIAS):
            findings.problem(
                (*path, str(key)), "not a kind of device", "cpu, cuda (or gpu) or rocm", "Correct the name."
            )
    if given.get(_GPU_ALIAS) is not None and given.get("cuda") is not None:
        findings.problem((*path, _GPU_ALIAS), "given with cuda", "one of the two", "Move it to cuda.")


def images(given: Any, default: str) -> dict[str, Any]:
    """Return the container image of each kind of device; ``default`` if not given."""
    # `given` is one image for all kinds, or a mapping from kind to image.
    if not isinstance(given, Mapping):
        return dict.fromkeys(DEVICES, given or default)
    return {device: of_device(given, device) or default for device in DEVICES}


def check_environment(raw: dict[str, Any], findings: Diagnostics) -> dict[str, dict[str, str]]:
    """Check the environment variables; complete ``raw`` in place as Determined does.

    Returns:
        Variables by device kind ("cpu", "cuda", "rocm").
    """
    image = raw["environment"]["image"]
    if isinstance(image, Mapping):
        check_devices(image, ("environment", "image"), findings)
    given = raw["environment"]["environment_variables"]
    if isinstance(given, Mapping):
        check_devices(given, ("environment", "environment_variables"), findings)
        by_device = {device: of_device(given, device) or [] for device in DEVICES}
    else:
        by_device = dict.fromkeys(DEVICES, given)
    variables: dict[str, dict[str, str]] = {}
    for device, entries in by_device.items():
        variables[device] = {}
        for index, entry in enumerate(entries if isinstance(entries, list) else [entries]):
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
    given = raw["environment"]["environment_variables"]
    entries = (
        [entry for values in given.values() for entry in values or []]
        if isinstance(given, Mapping)
        else given
    )
    for name in sorted({str(entry).partition("=")[0] for entry in entries or []}):
        if name.startswith("DET_") and name not in _FREE_DET_VARIABLES:
            findings.problem(
                "environment.environment_variables",
                f"{name}, a name that the master sets itself",
                f"names that do not begin with DET_, or one of {', '.join(_FREE_DET_VARIABLES)}",
                "Choose another name.",
            )
