"""Compute how a job's ranks are divided into replicas, stages and other groups."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from dstrial.config.dotted_keys import count_in, value_at
from dstrial.errors import ConfigError, ConfigProblem

DIM_KEYS = {"pipeline_stages": "pp", "model_parallel_size": "tp", "sequence_parallel_size": "sp"}
"""Key of a checkpoint's layout -> field of ``ParallelDims``, for each dimension of a replica.

``SECTION_KEYS`` are also keys of ``data.dstrial``.
"""
SECTION_KEYS = ("pipeline_stages", "model_parallel_size")
AUTOTP_KEY = "tensor_parallel.autotp_size"
CONFIG_KEYS = {AUTOTP_KEY: "model_parallel_size", "sequence_parallel_size": "sequence_parallel_size"}
"""Dotted key of a DeepSpeed config -> the key of ``DIM_KEYS`` that it sets."""
# Fields whose product is the number of ranks of a replica.
_IN_REPLICA = ("pp", "tp", "sp")


@dataclasses.dataclass(frozen=True, slots=True)
class ParallelDims:
    """Parallel dimensions of a job, for which ``world_size = dp x pp x tp x sp``.

    Raises:
        ValueError: a size is below 1, or ``world_size`` is not a multiple of ``pp x tp x sp``.
    """

    world_size: int
    pp: int = 1  # pipeline stages
    tp: int = 1  # ranks that share each layer, through AutoTP or an mpu
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
        """Return the dimensions of a job with a single replica.

        ``sizes`` are fields of this class other than ``world_size``.
        """
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
        """Whether the model is split by a pipeline or by tensor parallelism.

        DeepSpeed then uses the ``mpu`` (model-parallel unit) of the pipeline or the trial, or the groups that AutoTP creates.
        """
        return self.has_pipeline_engine or self.tp > 1

    def on(self, world_size: int) -> ParallelDims:
        """Return the dimensions of ``world_size`` ranks with replicas of unchanged size.

        Raises:
            ValueError: ``world_size`` is not a multiple of the ranks of a replica.
        """
        return dataclasses.replace(self, world_size=world_size)

    def replicas_on(self, world_size: int) -> int:
        """Return how many whole replicas ``world_size`` ranks form, at least 1."""
        return max(world_size // self.ranks_per_replica, 1)

    def with_section(self, section: Any) -> ParallelDims:
        """Return the dimensions of a job with one replica, sized by ``data.dstrial``.

        ``section`` is the content of ``data.dstrial``. For sizes that are missing or invalid there, this object's sizes are
        used.
        """
        sizes = {field: count_in(section, key) or getattr(self, field) for key, field in DIM_KEYS.items()}
        return ParallelDims.of_replica(**sizes, is_pipeline=self.is_pipeline)

    def to_layout(self) -> dict[str, Any]:
        """Return the dimensions as fields of a checkpoint's ``Layout``, in field order."""
        return {
            "world_size": self.world_size,
            "data_parallel_size": self.dp,
            **{key: getattr(self, field) for key, field in DIM_KEYS.items()},
        }


def config_sizes(config: Mapping[str, Any] | None) -> dict[str, int]:
    """Return the AutoTP and sequence-parallel sizes that a DeepSpeed config sets.

    The result maps keys of ``DIM_KEYS`` to sizes. Sizes that the config does not set, or sets to an invalid value, are left
    out.
    """
    given = {key: value_at(config or {}, path) for path, key in CONFIG_KEYS.items()}
    return {key: value for key, value in given.items() if type(value) is int and value > 0}


def autotp_clash(
    model_parallel_size: int | None, config: Mapping[str, Any] | None
) -> tuple[str, str, str] | None:
    """Return a problem as (got, expected, fix) if two tensor-parallel sizes differ.

    The sizes are ``model_parallel_size`` of ``data.dstrial``, and AutoTP's size in ``config``, the DeepSpeed config. The result
    is None if they agree, if ``model_parallel_size`` is None, or if AutoTP is unused.
    """
    size = config_sizes(config).get("model_parallel_size", 1)
    if size == 1 or model_parallel_size in (None, size):
        return None
    return (
        str(model_parallel_size),
        f"{size}, the {AUTOTP_KEY} of the DeepSpeed config",
        "Remove it: AutoTP's size is read from the DeepSpeed config.",
    )


def batch_replicas(config: Mapping[str, Any], dims: ParallelDims) -> int:
    """Return the replicas in DeepSpeed's batch equation; usually they are ``dims.dp``.

    ``config`` is the DeepSpeed config.

    With AutoTP the result is the number of all ranks, because DeepSpeed parses the config before it creates AutoTP's groups.
    Source: ``runtime/config.py:458``.
    """
    sizes = config_sizes(config)
    if sizes.get("model_parallel_size", 1) > 1 and not dims.has_pipeline_engine:
        return dims.world_size
    sequence = sizes.get("sequence_parallel_size", 1)
    if sequence > 1 and dims.world_size % sequence == 0 and not dims.has_mpu:
        return dims.world_size // sequence
    return dims.dp


def replicas_of(
    data_config: Mapping[str, Any],
    world_size: int,
    asked: int | None = None,
    *,
    otherwise: int = 1,
    config: Mapping[str, Any] | None = None,
) -> int:
    """Return the number of replicas in the batch equation of a running trial.

    Ranks per replica come from ``data.dstrial``, the DeepSpeed config or user code.

    Args:
        data_config: the experiment config's ``data`` section.
        world_size: number of all ranks.
        asked: ranks per replica that user code sets, without sequence parallelism; None if user code sets no number.
        otherwise: ranks per replica if neither configs nor user code set a number, such as those of a resumed checkpoint.
        config: the DeepSpeed config, whose sizes must agree with the section and ``asked``.

    Raises:
        ConfigError: the ranks cannot be divided into replicas, or two sources of a size disagree.
    """
    section = data_config.get("dstrial")
    given = section if isinstance(section, Mapping) else {}
    sizes_given = {key: given[key] for key in SECTION_KEYS if isinstance(given.get(key), int)}
    sizes = {key: size for key, size in config_sizes(config).items() if size > 1}
    if "pipeline_stages" in sizes_given:  # with a pipeline AutoTP is an error, and the other size is not read
        sizes = {}
    if clash := autotp_clash(sizes_given.get("model_parallel_size"), config):
        raise ConfigError([ConfigProblem("data.dstrial.model_parallel_size", *clash)])
    sizes_given |= sizes
    product = math.prod(sizes_given.values())
    # `asked` does not count the ranks of a sequence.
    if sizes_given and asked is not None and asked * sizes.get("sequence_parallel_size", 1) != product:
        problem = ConfigProblem(
            "model_parallel_size of get_deepspeed_config()",
            f"{asked}, but the configs say {' x '.join(f'{key} {value}' for key, value in sizes_given.items())}",
            "the same number of ranks per replica",
            "Leave it out of the call, or correct data.dstrial or the DeepSpeed config.",
        )
        raise ConfigError([problem])
    per_replica = product if sizes_given else otherwise if asked is None else asked
    if per_replica < 1 or world_size % per_replica:
        problem = ConfigProblem(
            "data.dstrial" if sizes_given else "model_parallel_size of get_deepspeed_config()",
            f"{per_replica} ranks per replica on {world_size} ranks",
            "replicas that use all ranks",
            f"Start a multiple of {max(per_replica, 1)} ranks, or correct the number.",
        )
        raise ConfigError([problem])
    dims = ParallelDims(world_size, tp=per_replica)  # how a replica is divided does not matter here
    return batch_replicas(config or {}, dims)
