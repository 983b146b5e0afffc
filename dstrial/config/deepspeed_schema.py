"""Read the committed tables of DeepSpeed's config keys, and the installed version.

``tools/generate_deepspeed_rules.py`` generates ``deepspeed_tables/RELEASE.json`` from each supported release. A table may hold
only the differences from another table. ``root`` describes the top level as a :class:`dstrial.config.keys.Section`. ``removed``
lists the keys that DeepSpeed rejects, by section. ``optimizers`` and ``schedulers`` map each type to its parameter names
(``params``, absent if any name is accepted) and ``required`` parameters, and mark optimizers that DeepSpeed tests with ZeRO.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import importlib.resources
import json
from collections.abc import Mapping
from typing import Any

from dstrial.config.keys import Section

_TABLES = importlib.resources.files("dstrial.config").joinpath("deepspeed_tables")


@dataclasses.dataclass(frozen=True, slots=True)
class DeepSpeedRules:
    """The config keys and types that one DeepSpeed release accepts."""

    version: str
    root: Section
    removed: Mapping[str, tuple[str, ...]]  # rejected keys, by dotted section
    optimizers: Mapping[str, Mapping[str, Any]]  # by name; DeepSpeed's own names in lower case
    schedulers: Mapping[str, Mapping[str, Any]]


def deepspeed_rules(version: str | None = None) -> DeepSpeedRules:
    """Return the rules of a DeepSpeed release, by default of the installed release.

    A release without a table gets the newest table.
    """
    wanted = (version or installed_deepspeed_version() or "").split("+")[0]
    return _rules_of(wanted if wanted in releases() else releases()[-1])


@functools.cache
def releases() -> tuple[str, ...]:
    """Return the DeepSpeed releases that have a table, newest last."""
    names = [path.name.removesuffix(".json") for path in _TABLES.iterdir() if path.name.endswith(".json")]
    return tuple(sorted(names, key=release_key))


def release_key(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")))


@functools.cache
def _rules_of(release: str) -> DeepSpeedRules:
    table = read_table(release)
    return DeepSpeedRules(
        version=table["deepspeed"],
        root=Section.from_table(table["root"]),
        removed={section: tuple(keys) for section, keys in table["removed"].items()},
        optimizers=table["optimizers"],
        schedulers=table["schedulers"],
    )


def read_table(release: str) -> dict[str, Any]:
    """Return a release's table; differences are applied to their base table.

    In a table of differences, ``differs_from`` names the base release, ``set`` maps dotted paths to new values, and ``absent``
    lists the paths to delete.
    """
    table: dict[str, Any] = json.loads(_TABLES.joinpath(f"{release}.json").read_text(encoding="utf-8"))
    if "differs_from" not in table:
        return table
    whole = read_table(table["differs_from"])
    for path, value in {**dict.fromkeys(table["absent"]), **table["set"]}.items():
        *sections, key = path.split(".")
        owner = functools.reduce(dict.__getitem__, sections, whole)
        if path in table["set"]:
            owner[key] = value
        else:
            del owner[key]
    return whole


@functools.cache
def installed_deepspeed_version() -> str | None:
    """Return DeepSpeed's installed version without importing it; None if missing."""
    try:
        return importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        return None
