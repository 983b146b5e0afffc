"""A DeepSpeed config in one view: effective and given values, sizes of the job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dstrial.config.diagnostics import Diagnostics, render
from dstrial.config.dotted_keys import value_at
from dstrial.config.keys import AUTO
from dstrial.config.parallel_dims import ParallelDims


class Settings:
    """A DeepSpeed config as rules look at it, and where they put what they find.

    ``effective`` is ``config`` with defaults filled in, from :func:`dstrial.config.keys.check_keys`.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        effective: Mapping[str, Any],
        sizes: ParallelDims,
        findings: Diagnostics,
    ) -> None:
        self._config = config
        self._effective = effective
        self.sizes = sizes
        self.findings = findings

    def value(self, key: str) -> Any:
        """Return the effective value under a dotted key; None if there is no such key."""
        return value_at(self._effective, key)

    def is_given(self, key: str) -> bool:
        """Say whether the config has the dotted key; null and "auto" count as absent."""
        return value_at(self._config, key) not in (None, AUTO)

    @property
    def stage(self) -> int:
        return int(self.value("zero_optimization.stage") or 0)

    @property
    def optimizer(self) -> str | None:
        """Optimizer type as DeepSpeed compares it: its own names in lower case."""
        name = self.value("optimizer.type")
        return name.lower() if isinstance(name, str) else None

    def device(self, section: str) -> str:
        return str(self.value(f"zero_optimization.{section}.device") or "none")

    def problem(self, key: str, expected: str, fix: str) -> None:
        """Record that the value under a key conflicts with another setting."""
        got = render(self.value(key))
        if not self.is_given(key):
            got += " (DeepSpeed's default)"
        self.findings.problem(key, got, expected, fix)

    def warn(self, key: str, text: str) -> None:
        """Record that the value under a key has no effect, or an unexpected one."""
        self.findings.warn(key, f"is {render(self.value(key))}, {text}")
