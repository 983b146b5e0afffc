"""Structured sections: mounts, devices, proxy ports, webhooks, log policies.

Nothing is mounted where there are no containers; the fields are kept for whoever reads the config.

Source: Determined 0.38.1 schemas/expconf/v0 (bind-mount, device, proxy-port) and schemas/test_cases/v0/defaults.yaml.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import re2

from dstrial.config.diagnostics import Diagnostics, KeyPath, render
from dstrial.config.keys import Rule, Section, check_keys
from dstrial.config.schema import DIALECT

_TEXT = Rule(types=("string",))
_FALSE = Rule(types=("boolean",), default=False)
_MOUNT = Section(
    {
        "host_path": _TEXT,
        "container_path": _TEXT,
        "read_only": _FALSE,
        "propagation": Rule(types=("string",), default="rprivate"),
    }
)
_DEVICE = Section(
    {
        "host_path": _TEXT,
        "container_path": _TEXT,
        "mode": Rule(types=("string",), default="mrw"),
    }
)
_PORT = Section(
    {
        "proxy_port": Rule(types=("integer",), minimum=1, maximum=65535),
        "proxy_tcp": _FALSE,
        "unauthenticated": _FALSE,
        "default_service_id": _FALSE,
    }
)
# Source: Determined 0.38.1 schemas/expconf/v0/resources.json.
_MEMORY_SIZE = re.compile(r"([0-9]*\.)?[0-9]+ ?([kmgtp](i?b)?|b)?", re.ASCII | re.IGNORECASE)


def complete_mounts(raw: dict[str, Any], findings: Diagnostics) -> None:
    """Complete the lists of mounts, devices and proxy ports of ``raw`` in place.

    ``resources.shm_size`` is checked too.
    """
    size = raw["resources"]["shm_size"]
    if isinstance(size, str) and not _MEMORY_SIZE.fullmatch(size):
        findings.problem(
            ("resources", "shm_size"), render(size), "a memory size", "Write 1.5 gb, for example."
        )
    raw["bind_mounts"] = [
        _item(_MOUNT, ("bind_mounts", index), item, ("host_path", "container_path"), findings)
        for index, item in enumerate(raw["bind_mounts"] or [])
    ]
    for index, mount in enumerate(raw["bind_mounts"]):
        if mount.get("host_path") and not mount["host_path"].startswith("/"):
            path = ("bind_mounts", index, "host_path")
            fix = f"Write /{mount['host_path']}, or the full path."
            findings.problem(path, render(mount["host_path"]), "an absolute path", fix)
        if mount.get("container_path") == ".":
            path = ("bind_mounts", index, "container_path")
            findings.problem(
                path, '"."', "a path other than the working directory itself", "Name a directory in it."
            )
    resources, environment = raw["resources"], raw["environment"]
    resources["devices"] = [
        _item(
            _DEVICE, ("resources", "devices", index), _device(item), ("host_path", "container_path"), findings
        )
        for index, item in enumerate(resources["devices"] or [])
    ]
    environment["proxy_ports"] = [
        _item(_PORT, ("environment", "proxy_ports", index), item, ("proxy_port",), findings)
        for index, item in enumerate(environment["proxy_ports"] or [])
    ]


def _device(item: Any) -> Any:
    """Return ``host:container[:mode]`` as its fields; anything else as it is."""
    if not isinstance(item, str) or not 2 <= len(item.split(":")) <= 3:
        return item
    return dict(zip(("host_path", "container_path", "mode"), item.split(":"), strict=False))


def _item(
    section: Section, path: KeyPath, item: Any, required: tuple[str, ...], findings: Diagnostics
) -> dict[str, Any]:
    if not isinstance(item, Mapping):
        expected = f"a mapping with {' and '.join(required)}"
        findings.problem(path, render(item), expected, f"Write {{{required[0]}: …}}.")
        return {}
    whole = check_keys(section, item, DIALECT, findings, path)
    for key in required:
        if item.get(key) is None:
            findings.problem((*path, key), "not given", "a value", f"Add {key}.")
    return whole


_KEYS = ("webhook_id", "webhook_name", "exclude")


def check_integrations(raw: Mapping[str, Any], findings: Diagnostics) -> None:
    """Check ``integrations.webhooks``; what is said of other systems is kept as it is.

    Source: Determined 0.38.1 schemas/expconf/v0/webhooks.json.
    """
    integrations = raw["integrations"]
    if integrations is None:
        return
    if not isinstance(integrations, Mapping):
        findings.problem(
            "integrations", render(integrations), "a mapping", "Write {webhooks: {webhook_name: [NAME]}}."
        )
        return
    given = integrations.get("webhooks")
    if given is None:
        return
    if not isinstance(given, Mapping):
        findings.problem("integrations.webhooks", render(given), "a mapping", "Write {webhook_name: [NAME]}.")
        return
    where = ("integrations", "webhooks")
    for key in sorted(set(map(str, given)) - set(_KEYS)):
        findings.problem((*where, key), "not a key of webhooks", ", ".join(_KEYS), "Remove it.")
    ids, names, excludes = (given.get(key) for key in _KEYS)
    if ids is not None and not (
        isinstance(ids, list) and all(isinstance(one, int) and not isinstance(one, bool) for one in ids)
    ):
        findings.problem(
            (*where, "webhook_id"), render(ids), "a list of numbers of webhooks", "Write [1], for example."
        )
    if names is not None and not (isinstance(names, list) and all(isinstance(one, str) for one in names)):
        findings.problem(
            (*where, "webhook_name"),
            render(names),
            "a list of names of webhooks",
            "Write [NAME], for example.",
        )
    if excludes is not None and not isinstance(excludes, bool):
        findings.problem((*where, "exclude"), render(excludes), "true or false", "Write true.")


DEVICES = ("cpu", "cuda", "rocm")
_OLD_CUDA = "gpu"


def of_device(given: Mapping[str, Any], device: str) -> Any:
    """Return what a mapping gives for a kind of device; None if nothing."""
    value = given.get(device)
    return given.get(_OLD_CUDA) if value is None and device == "cuda" else value


def add_variables(environment: dict[str, Any], variables: Sequence[str]) -> None:
    """Put environment variables before those of a config, for every kind of device."""
    given = environment.get("environment_variables") or []
    if isinstance(given, Mapping):
        given = {device: [*variables, *(of_device(given, device) or [])] for device in DEVICES}
    elif isinstance(given, list):
        given = [*variables, *given]
    environment["environment_variables"] = given


def with_new_names(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a mapping with ``cuda`` in place of ``gpu``; other keys as they are."""
    renamed = {key: value for key, value in given.items() if key != _OLD_CUDA}
    if _OLD_CUDA in given:
        renamed["cuda"] = of_device(given, "cuda")
    return renamed


def check_devices(given: Mapping[str, Any], path: KeyPath, findings: Diagnostics) -> None:
    """Report unknown kinds of device, and one device under both of its names."""
    for key in given:
        if key not in (*DEVICES, _OLD_CUDA):
            findings.problem(
                (*path, str(key)), "not a kind of device", "cpu, cuda (or gpu) or rocm", "Correct the name."
            )
    if given.get(_OLD_CUDA) is not None and given.get("cuda") is not None:
        findings.problem((*path, _OLD_CUDA), "given with cuda", "one of the two", "Move it to cuda.")


def images(given: Any, default: str) -> dict[str, Any]:
    """Return the image of every kind of device: ``environment.image``, or a default."""
    # `given` is one image for all, or a mapping.
    if not isinstance(given, Mapping):
        return dict.fromkeys(DEVICES, given or default)
    return {device: of_device(given, device) or default for device in DEVICES}


_MAX_MEMORY_BYTES = 2**23
"""What one compiled pattern may take; RE2's own default."""


def compile_pattern(text: str) -> Any:
    """Compile a RE2 pattern whose ``^`` and ``$`` match at the lines of a text.

    Python's own search backtracks: ``(a+)+$`` and a line of forty letters would block the master for hours.
    The result has ``search(str)``; ValueError says why a pattern is none.
    Syntax: https://github.com/google/re2/wiki/Syntax.
    """
    options = re2.Options()
    options.log_errors = False
    options.max_mem = _MAX_MEMORY_BYTES
    try:
        return re2.compile(f"(?m){text}", options)
    except re2.error as error:
        reason = error.args[0] if error.args else error
        raise ValueError(
            reason.decode(errors="replace") if isinstance(reason, bytes) else str(reason)
        ) from None
    except UnicodeEncodeError:
        raise ValueError("half a surrogate") from None
