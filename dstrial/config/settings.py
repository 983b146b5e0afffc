"""One complete view of a DeepSpeed config: effective values, what the user gave, sizes of the job."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from dstrial.config.dotted_keys import value_at
from dstrial.config.findings import Findings, render
from dstrial.config.keys import AUTO


@dataclasses.dataclass(frozen=True, slots=True)
class ParallelSizes:
    """How many ranks there are and how they are divided.

    Attributes:
        world_size: number of ranks, at least 1.
        pipeline_stages: ranks that together hold one pipeline.
        model_parallel_size: ranks that share each layer (tensor parallelism through an mpu).
        is_pipeline: whether the model is a ``PipelineModule``, even one of a single stage.

    Raises:
        ValueError: the ranks cannot be divided so.
    """

    world_size: int
    pipeline_stages: int = 1
    model_parallel_size: int = 1
    is_pipeline: bool = False

    def __post_init__(self) -> None:
        ranks_per_replica = self.pipeline_stages * self.model_parallel_size
        if min(self.world_size, self.pipeline_stages, self.model_parallel_size) < 1:
            raise ValueError(f"{self} is not a layout; expected sizes of at least 1. Pass positive sizes.")
        if self.world_size % ranks_per_replica:
            raise ValueError(
                f"world_size is {self.world_size}; expected a multiple of {ranks_per_replica} (pipeline_stages x "
                f"model_parallel_size). Start {self.world_size // ranks_per_replica * ranks_per_replica} or "
                f"{(self.world_size // ranks_per_replica + 1) * ranks_per_replica} ranks."
            )

    @property
    def data_parallel_size(self) -> int:
        """Number of replicas of the model."""
        return self.world_size // (self.pipeline_stages * self.model_parallel_size)

    @property
    def has_pipeline_engine(self) -> bool:
        """Whether DeepSpeed uses its PipelineEngine."""
        return self.is_pipeline or self.pipeline_stages > 1


class Settings:
    """What the rules about pairs of settings look at. Reads only.

    Args:
        config: the config as given.
        effective: the same with defaults filled in, from :func:`dstrial.config.keys.check_keys`.
        sizes: ranks and their division.
        findings: receives what the rules find.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        effective: Mapping[str, Any],
        sizes: ParallelSizes,
        findings: Findings,
    ) -> None:
        self._config = config
        self._effective = effective
        self.sizes = sizes
        self.findings = findings

    def value(self, key: str) -> Any:
        """Return the effective value under a dotted key; None if there is no such key."""
        return value_at(self._effective, key)

    def is_given(self, key: str) -> bool:
        """Say whether the config itself has the dotted key (null and "auto" count as absent)."""
        return value_at(self._config, key) not in (None, AUTO)

    def is_at_default(self, key: str, default: object) -> bool:
        """Say whether the effective value is the given one."""
        return bool(self.value(key) == default)

    @property
    def stage(self) -> int:
        """ZeRO stage, 0 to 3."""
        return int(self.value("zero_optimization.stage") or 0)

    @property
    def optimizer(self) -> str | None:
        """Optimizer type as DeepSpeed compares it: its own names in lower case."""
        name = self.value("optimizer.type")
        return name.lower() if isinstance(name, str) else None

    def device(self, section: str) -> str:
        """Return where ``offload_optimizer`` or ``offload_param`` offloads to; "none" if it does not."""
        return str(self.value(f"zero_optimization.{section}.device") or "none")

    def problem(self, key: str, expected: str, fix: str) -> None:
        """Record that the value under a key cannot go with another setting."""
        got = render(self.value(key))
        if not self.is_given(key):
            got += " (DeepSpeed's default)"
        self.findings.problem(key, got, expected, fix)

    def warn(self, key: str, text: str) -> None:
        """Record that the value under a key has no effect, or another one than it says."""
        self.findings.warn(key, f"is {render(self.value(key))}, {text}")
