"""How many replicas of the model there are: ranks divided by the ranks that form one replica. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dstrial.errors import ConfigError, ConfigProblem

_KEYS = ("pipeline_stages", "model_parallel_size")


def replicas_of(
    data_config: Mapping[str, Any], world_size: int, asked: int | None = None, *, otherwise: int = 1
) -> int:
    """Return the data-parallel size by the rule of ``dstrial check``.

    Args:
        data_config: the ``data`` section of the experiment config; its ``dstrial`` may say how a replica is formed.
        world_size: number of ranks, at least 1.
        asked: ranks of one replica as user code gives them; None if it leaves that to the config.
        otherwise: ranks of one replica where neither says; a checkpoint's, for a run that goes on from it.

    Raises:
        ConfigError: the two do not agree, or the ranks cannot be divided so.
    """
    section = data_config.get("dstrial")
    given = section if isinstance(section, Mapping) else {}
    told = {key: given[key] for key in _KEYS if isinstance(given.get(key), int)}
    per_replica = otherwise if asked is None else asked
    where = "model_parallel_size of get_deepspeed_config()"
    if told:
        product = _product(told)
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


def _product(sizes: Mapping[str, int]) -> int:
    """Return the ranks of one replica: pipeline stages times model-parallel size, each 1 where it is not given."""
    product = 1
    for key in _KEYS:
        product *= sizes.get(key, 1)
    return product
