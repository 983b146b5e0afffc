"""Read the committed table of DeepSpeed's config keys, and the installed version.

``tools/generate_deepspeed_rules.py`` generates the table from an installed release; other releases are checked by it with a
warning. ``root`` describes the top level as a :class:`dstrial.config.keys.Section`. ``optimizers`` and
``schedulers`` map each type to its parameter names (``params``, absent if any name is accepted) and ``required`` parameters, and
mark optimizers that DeepSpeed tests with ZeRO.
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

TABLE = importlib.resources.files("dstrial.config").joinpath("deepspeed_table.json")


@dataclasses.dataclass(frozen=True, slots=True)
class DeepSpeedRules:
    """The config keys and types that one DeepSpeed release accepts."""

    version: str
    root: Section
    optimizers: Mapping[str, Mapping[str, Any]]  # by name; DeepSpeed's own names in lower case
    schedulers: Mapping[str, Mapping[str, Any]]


@functools.cache
def deepspeed_rules() -> DeepSpeedRules:
    """Return the rules of the DeepSpeed release that has a table."""
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    return DeepSpeedRules(
        version=table["deepspeed"],
        root=Section.from_table(table["root"]),
        optimizers=table["optimizers"],
        schedulers=table["schedulers"],
    )


@functools.cache
def installed_deepspeed_version() -> str | None:
    """Return DeepSpeed's installed version without importing it; None if missing."""
    try:
        return importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        return None
