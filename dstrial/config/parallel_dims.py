"""The parallel dimensions of a job: data, pipeline, tensor, sequence, expert."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from dstrial.errors import ConfigError, ConfigProblem

DIM_KEYS = {"pipeline_stages": "pp", "model_parallel_size": "tp"}
"""Key of ``data.dstrial`` and of a checkpoint's layout -> field of ``ParallelDims``, for each dimension of a replica."""
# Fields whose product is the number of ranks of a replica.
_IN_REPLICA = ("pp", "tp", "sp")


@dataclasses.dataclass(frozen=True, slots=True)
class ParallelDims:
    """Parallel dimensions of a job, for which ``world_size = dp x pp x tp x sp``.

    Raises:
        ValueError: a size is below 1, or the equation has no whole ``dp``.
    """

    world_size: int
    pp: int = 1  # pipeline stages
    tp: int = 1  # ranks that share each layer, through an mpu
    sp: int = 1  # ranks that share each sequence (`sequence_parallel_size`)
    ep: int = 1  # ranks that share a layer's experts; these ranks belong to different replicas
    is_pipeline: bool = False  # whether the model is a `PipelineModule`, even with a single stage

    def __post_init__(self) -> None:
        unit = self.ranks_per_replica
        if min(self.world_size, self.ep, *(getattr(self, field) for field in _IN_REPLICA)) < 1:
            raise ValueError(f"{self} is not a layout; expected sizes of at least 1. Pass positive sizes.")
        if self.world_size % unit:
            raise ValueError(
                f"world_size is {self.world_size}; expected a multiple of {unit} ({' x '.join(DIM_KEYS)}). Start "
                f"{self.world_size // unit * unit} or {(self.world_size // unit + 1) * unit} ranks."
            )

    @classmethod
    def of_replica(cls, **sizes: Any) -> ParallelDims:
        """Return the dimensions of a job with a single replica."""
        return cls(math.prod(sizes.get(field, 1) for field in _IN_REPLICA), **sizes)

    @property
    def dp(self) -> int:
        """The number of model replicas, each with its own shard of the records."""
        return self.world_size // self.ranks_per_replica

    @property
    def ranks_per_replica(self) -> int:
        return math.prod(getattr(self, field) for field in _IN_REPLICA)

    @property
    def has_pipeline_engine(self) -> bool:
        """Whether DeepSpeed trains the model with a ``PipelineEngine``."""
        return self.is_pipeline or self.pp > 1

    @property
    def has_mpu(self) -> bool:
        """Whether DeepSpeed uses an ``mpu`` (model-parallel unit) of pipeline or trial."""
        return self.has_pipeline_engine or self.tp > 1

    def on(self, world_size: int) -> ParallelDims:
        """Return the same replica layout on another number of ranks.

        Raises:
            ValueError: ``world_size`` is no multiple of the ranks of a replica.
        """
        return dataclasses.replace(self, world_size=world_size)

    def replicas_on(self, world_size: int) -> int:
        """Return the number of replicas on ``world_size`` ranks, at least 1."""
        return max(world_size // self.ranks_per_replica, 1)

    def with_section(self, section: Any) -> ParallelDims:
        """Return a single replica; sizes in ``section`` (``data.dstrial``) override."""
        given = section if isinstance(section, Mapping) else {}
        sizes = {field: getattr(self, field) for field in DIM_KEYS.values()}
        for key, field in DIM_KEYS.items():
            value = given.get(key)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                sizes[field] = value
        return ParallelDims.of_replica(**sizes, is_pipeline=self.is_pipeline)

    def to_layout(self) -> dict[str, Any]:
        """Return the dimensions as fields of an engine's ``Layout``, in its field order."""
        return {
            "world_size": self.world_size,
            "data_parallel_size": self.dp,
            **{key: getattr(self, field) for key, field in DIM_KEYS.items()},
        }


def replicas_of(
    data_config: Mapping[str, Any], world_size: int, asked: int | None = None, *, otherwise: int = 1
) -> int:
    """Return the data-parallel size; raise ConfigError as ``dstrial check`` does.

    ``data_config`` is the ``data`` section. ``asked`` is the ranks per replica from user code. ``otherwise`` is that of
    the resumed checkpoint, used if neither the section nor user code has a number.
    """
    section = data_config.get("dstrial")
    given = section if isinstance(section, Mapping) else {}
    told = {key: given[key] for key in DIM_KEYS if isinstance(given.get(key), int)}
    per_replica = otherwise if asked is None else asked
    where = "model_parallel_size of get_deepspeed_config()"
    if told:
        product = math.prod(told.values())
        where = "data.dstrial"
        if asked not in (None, product):
            names = " x ".join(f"{key} {value}" for key, value in told.items())
            raise ConfigError(
                [
                    ConfigProblem(
                        "model_parallel_size of get_deepspeed_config()",
                        f"{asked}, but data.dstrial says {names}",
                        f"{product}, the ranks of one replica, in both",
                        "Leave it out of the call, or correct data.dstrial.",
                    )
                ]
            )
        per_replica = product
    if per_replica < 1 or world_size % per_replica:
        raise ConfigError(
            [
                ConfigProblem(
                    where,
                    f"{per_replica} ranks per replica on {world_size} ranks",
                    "replicas that use all ranks",
                    f"Start a multiple of {max(per_replica, 1)} ranks, or correct the number.",
                )
            ]
        )
    return world_size // per_replica
