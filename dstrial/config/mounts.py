"""Mounts, devices and proxy ports of an experiment config: what each item must have, and its defaults.

Nothing is mounted where there are no containers; the fields are kept for whoever reads the config.

Source: Determined 0.38.1 schemas/expconf/v0 (bind-mount, device, proxy-port) and schemas/test_cases/v0/defaults.yaml.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dstrial.config.findings import Findings, KeyPath, render
from dstrial.config.keys import Dialect, Rule, Section, check_keys

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
_DIALECT = Dialect(name="the experiment config", null_is_absent=True)


def complete_mounts(raw: dict[str, Any], findings: Findings) -> None:
    """Fill in the items of ``bind_mounts``, ``resources.devices`` and ``environment.proxy_ports``.

    Args:
        raw: the config with defaults; the three lists are replaced.
        findings: receives the problems.
    """
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
    section: Section, path: KeyPath, item: Any, required: tuple[str, ...], findings: Findings
) -> dict[str, Any]:
    if not isinstance(item, Mapping):
        expected = f"a mapping with {' and '.join(required)}"
        findings.problem(path, render(item), expected, f"Write {{{required[0]}: …}}.")
        return {}
    whole = check_keys(section, item, _DIALECT, findings, path)
    for key in required:
        if item.get(key) is None:
            findings.problem((*path, key), "not given", "a value", f"Add {key}.")
    return whole
