"""Input of the DeepSpeed rules: the table of one release, and the config to check.

``tools/generate_deepspeed_rules.py`` generates the table, ``deepspeed_table.json``, from an installed release. Configs for other
releases are checked by the same table, with a warning.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import importlib.resources
import json
from collections.abc import Mapping
from typing import Any

from dstrial.config.batch import AUTO
from dstrial.config.diagnostics import Diagnostics, render
from dstrial.config.dotted_keys import value_at
from dstrial.config.keys import Section
from dstrial.config.parallel_dims import ParallelDims

ZERO = "zero_optimization"
TABLE = importlib.resources.files("dstrial.config").joinpath("deepspeed_table.json")


@dataclasses.dataclass(frozen=True, slots=True)
class DeepSpeedRules:
    """The config keys, optimizers and schedulers that one DeepSpeed release accepts.

    Each optimizer or scheduler is a mapping. ``params`` lists its parameters; if missing, any parameter name is accepted.
    ``required`` lists the required parameters. For an optimizer, ``zero_tested`` is whether DeepSpeed tests it with ZeRO.
    """

    version: str
    root: Section  # top level of the config
    optimizers: Mapping[str, Mapping[str, Any]]  # by name; DeepSpeed's own names in lower case
    schedulers: Mapping[str, Mapping[str, Any]]  # by name


@functools.cache
def deepspeed_rules() -> DeepSpeedRules:
    """Return the content of ``deepspeed_table.json``."""
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


class Settings:
    """A DeepSpeed config that the rules check, and the rules' findings.

    Args:
        config: the config as given.
        effective: ``config`` with defaults filled in by :func:`dstrial.config.keys.check_keys`.
        sizes: parallel dimensions of the job.
        findings: collects the problems and warnings.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        effective: Mapping[str, Any],
        sizes: ParallelDims,
        findings: Diagnostics,
    ) -> None:
        self._config = config
        self.effective = effective
        self.sizes = sizes
        self.findings = findings

    def value(self, key: str) -> Any:
        """Return the effective value at a dotted key; None if the key does not exist."""
        return value_at(self.effective, key)

    def is_given(self, key: str) -> bool:
        """Return whether the dotted key is set; null and "auto" count as unset."""
        return value_at(self._config, key) not in (None, AUTO)

    @property
    def stage(self) -> int:
        return int(self.value(f"{ZERO}.stage") or 0)

    @property
    def optimizer(self) -> str | None:
        """The optimizer's type in lower case; None if the config has no optimizer."""
        name = self.value("optimizer.type")
        return name.lower() if isinstance(name, str) else None

    def device(self, section: str) -> str:
        return str(self.value(f"{ZERO}.{section}.device") or "none")

    @property
    def offloads_optimizer(self) -> bool:
        return self.device("offload_optimizer") != "none"

    def reject(self, is_wrong: object, key: str, expected: str, fix: str) -> None:
        """If ``is_wrong``, record that a key's value conflicts with another setting."""
        if is_wrong:
            self.problem(key, expected, fix)

    def problem(self, key: str, expected: str, fix: str) -> None:
        """Record as an error that the value at a key conflicts with another setting."""
        got = render(self.value(key))
        if not self.is_given(key):
            got += " (DeepSpeed's default)"
        self.findings.problem(key, got, expected, fix)

    def warn(self, key: str, text: str) -> None:
        """Warn that the value at a key has no effect, or an unexpected effect."""
        self.findings.warn(key, f"is {render(self.value(key))}, {text}")

    def warn_if_set(self, key: str, text: str) -> None:
        """Call :meth:`warn`, unless the value at ``key`` is false, zero, empty or missing."""
        if self.value(key):
            self.warn(key, text)
