"""What a script reads its DeepSpeed config from: the hyperparameters of a trial, tuned or not."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dstrial.config import overwrite_deepspeed_config
from dstrial.errors import ConfigError, ConfigProblem


def get_ds_config_from_hparams(
    hparams: Mapping[str, Any], base_dir: str | os.PathLike[str] = "."
) -> dict[str, Any]:
    """Return the DeepSpeed config that hyperparameters name, with their overwrites merged into it.

    Args:
        hparams: hyperparameters of the trial: ``deepspeed_config``, the path of a JSON file or its content, and, if
            something is to be changed, ``overwrite_deepspeed_args``; neither is changed.
        base_dir: directory that the path is relative to.

    Returns:
        A new dictionary, for ``deepspeed.initialize``.

    Raises:
        ConfigError: ``deepspeed_config`` is missing, or its file cannot be read.

    Ranks: any; no communication.
    """
    given = hparams.get("deepspeed_config")
    if given is None:
        fix = "Add deepspeed_config: ds_config.json to the hyperparameters of the experiment."
        raise ConfigError(
            [
                ConfigProblem(
                    "hyperparameters.deepspeed_config", "not given", "the path of a DeepSpeed JSON file", fix
                )
            ]
        )
    base = dict(given) if isinstance(given, Mapping) else str(Path(base_dir) / str(given))
    return overwrite_deepspeed_config(base, dict(hparams.get("overwrite_deepspeed_args") or {}))
