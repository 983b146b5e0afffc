"""The committed table of DeepSpeed's config keys, and which DeepSpeed is installed.

The table is generated from the supported release by ``tools/generate_deepspeed_rules.py``:
``root`` describes the top level as a :class:`dstrial.config.keys.Section`; ``removed`` lists keys that
DeepSpeed refuses, by section; ``optimizers`` and ``schedulers`` give for each type the names of its
parameters (``params``, absent where any is accepted), those ``required``, and whether ZeRO counts the
optimizer as tested.
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

TABLE_FILE = "deepspeed_rules_0_19.json"


@dataclasses.dataclass(frozen=True, slots=True)
class DeepSpeedRules:
    """What one DeepSpeed release accepts.

    Attributes:
        version: the release the table was generated from.
        root: the top level of its config.
        removed: keys it refuses, by dotted section.
        optimizers: by name, DeepSpeed's own in lower case; see the module docstring.
        schedulers: by name.
    """

    version: str
    root: Section
    removed: Mapping[str, tuple[str, ...]]
    optimizers: Mapping[str, Mapping[str, Any]]
    schedulers: Mapping[str, Mapping[str, Any]]


@functools.cache
def deepspeed_rules() -> DeepSpeedRules:
    """Return the rules of the supported DeepSpeed release; read once per process."""
    text = importlib.resources.files("dstrial.config").joinpath(TABLE_FILE).read_text(encoding="utf-8")
    table = json.loads(text)
    return DeepSpeedRules(
        version=table["deepspeed"],
        root=Section.from_table(table["root"]),
        removed={section: tuple(keys) for section, keys in table["removed"].items()},
        optimizers=table["optimizers"],
        schedulers=table["schedulers"],
    )


@functools.cache
def installed_deepspeed_version() -> str | None:
    """Return the version of the installed DeepSpeed without importing it; None if there is none."""
    try:
        return importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        return None
