"""Values by kind of device, as ``environment.image`` and ``environment.environment_variables`` have them. Pure.

``gpu`` is Determined's older word for ``cuda``: read, and never written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dstrial.config.findings import Findings, KeyPath

DEVICES = ("cpu", "cuda", "rocm")
_OLD_CUDA = "gpu"


def of_device(given: Mapping[str, Any], device: str) -> Any:
    """Return what a mapping gives for a kind of device; None if nothing."""
    value = given.get(device)
    return given.get(_OLD_CUDA) if value is None and device == "cuda" else value


def with_new_names(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a mapping with ``cuda`` in place of ``gpu``; other keys as they are."""
    renamed = {key: value for key, value in given.items() if key != _OLD_CUDA}
    if _OLD_CUDA in given:
        renamed["cuda"] = of_device(given, "cuda")
    return renamed


def check_devices(given: Mapping[str, Any], path: KeyPath, findings: Findings) -> None:
    """Report what is no kind of device, and the same device under both of its names."""
    for key in given:
        if key not in (*DEVICES, _OLD_CUDA):
            findings.problem(
                (*path, str(key)), "not a kind of device", "cpu, cuda (or gpu) or rocm", "Correct the name."
            )
    if given.get(_OLD_CUDA) is not None and given.get("cuda") is not None:
        findings.problem((*path, _OLD_CUDA), "given with cuda", "one of the two", "Move it to cuda.")


def images(given: Any, default: str) -> dict[str, Any]:
    """Return the image of every kind of device.

    Args:
        given: ``environment.image``: one for all, or a mapping.
        default: where none is given.
    """
    if not isinstance(given, Mapping):
        return dict.fromkeys(DEVICES, given or default)
    return {device: of_device(given, device) or default for device in DEVICES}
