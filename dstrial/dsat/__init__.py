"""dsat: tune the DeepSpeed configuration of an experiment.

``python3 -m dstrial.dsat METHOD CONFIG.yaml MODEL_DIR`` is the command. The names here are those of
``determined.pytorch.dsat``, resolved at first use: importing this package imports neither torch,
deepspeed nor transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dstrial.dsat.outcome import METRIC_NAMES, METRICS_TO_MAXIMIZE, METRICS_TO_MINIMIZE

if TYPE_CHECKING:
    from dstrial.dsat.hf_overwrites import get_hf_args_with_overwrites
    from dstrial.dsat.hyperparameters import get_ds_config_from_hparams
    from dstrial.dsat.trial.reporting import dsat_reporting_context

CONFIG_KEY = "deepspeed_config"
"""The hyperparameter that names the DeepSpeed config."""
OVERWRITE_KEY = "overwrite_deepspeed_args"
"""The hyperparameter that is merged over it."""
USE_DSAT_MODE_KEY = "_use_dsat_mode"
"""The hyperparameter that is true in a measuring trial."""
GAS_DEFAULT = 1
"""Accumulation where a config gives none."""
ALL_SEARCH_METHOD_NAMES = ("predict", "asha", "binary", "random")

__all__ = [
    # what a script calls
    "dsat_reporting_context",
    "get_ds_config_from_hparams",
    "get_hf_args_with_overwrites",
    # names and defaults
    "ALL_SEARCH_METHOD_NAMES",
    "CONFIG_KEY",
    "GAS_DEFAULT",
    "METRICS_TO_MAXIMIZE",
    "METRICS_TO_MINIMIZE",
    "METRIC_NAMES",
    "OVERWRITE_KEY",
    "USE_DSAT_MODE_KEY",
]

_HOMES = {
    "dsat_reporting_context": "dstrial.dsat.trial.reporting",
    "get_hf_args_with_overwrites": "dstrial.dsat.hf_overwrites",
    "get_ds_config_from_hparams": "dstrial.dsat.hyperparameters",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'dstrial.dsat' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
