"""Names of ``determined.pytorch.dsat`` that scripts import."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dstrial.config.merge import overwrite_deepspeed_config
from dstrial.errors import ConfigError, ConfigProblem
from dstrial.local.script_variables import MEASURING_KEY

__all__ = ["CONFIG_KEY", "GAS_DEFAULT", "OVERWRITE_KEY", "USE_DSAT_MODE_KEY"]

CONFIG_KEY = "deepspeed_config"  # the hyperparameter that names the DeepSpeed config
OVERWRITE_KEY = "overwrite_deepspeed_args"  # the hyperparameter whose values overwrite the DeepSpeed config
USE_DSAT_MODE_KEY = MEASURING_KEY  # the hyperparameter that is true in a measuring trial
GAS_DEFAULT = 1  # gradient accumulation steps if a config gives none


def get_ds_config_from_hparams(
    hparams: Mapping[str, Any], base_dir: str | os.PathLike[str] = "."
) -> dict[str, Any]:
    """Return the DeepSpeed config of a trial: a base config with overwritten keys.

    Args:
        hparams: hyperparameters of the trial, not modified. ``deepspeed_config`` is the base config or the path of its JSON file;
            ``overwrite_deepspeed_args`` (optional) has the keys to overwrite.
        base_dir: directory to which the path is relative.

    Returns:
        A new dictionary, for ``deepspeed.initialize``.

    Raises:
        ConfigError: ``deepspeed_config`` is missing, or its file cannot be read.

    Ranks: any; no communication.
    """
    given = hparams.get(CONFIG_KEY)
    if given is None:
        where = f"hyperparameters.{CONFIG_KEY}"
        fix = f"Add {CONFIG_KEY}: ds_config.json to the hyperparameters of the experiment."
        raise ConfigError([ConfigProblem(where, "not given", "the path of a DeepSpeed JSON file", fix)])
    base = dict(given) if isinstance(given, Mapping) else str(Path(base_dir) / str(given))
    return overwrite_deepspeed_config(base, dict(hparams.get(OVERWRITE_KEY) or {}))
