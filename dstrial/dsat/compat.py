"""The constants of ``determined.pytorch.dsat``, and a function for scripts.

Constants that need modules of the search are computed at first use, because training scripts import this module.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from dstrial.config.merge import overwrite_deepspeed_config
from dstrial.dsat.core.outcome import METRICS_TO_MAXIMIZE, METRICS_TO_MINIMIZE
from dstrial.errors import ConfigError, ConfigProblem
from dstrial.local.script_variables import MEASURING_KEY

if TYPE_CHECKING:
    ALL_SEARCH_METHOD_NAMES: tuple[str, ...]
    AUTOTUNING_ARG_DEFAULTS: Mapping[str, Any]
    DEFAULT_SEARCH_RUNNER_CONFIG: Mapping[str, Any]
    DEFAULT_ZERO_SEARCH_SPACE: Mapping[int, Mapping[str, tuple[Any, ...]]]

__all__ = [
    "ALL_SEARCH_METHOD_NAMES",
    "ARGS_PKL_PATH",
    "AUTOTUNING_ARG_DEFAULTS",
    "AUTOTUNING_RESULTS_PATH",
    "CONFIG_KEY",
    "DEFAULT_SEARCH_RUNNER_CONFIG",
    "DEFAULT_ZERO_SEARCH_SPACE",
    "GAS_DEFAULT",
    "LARGER_IS_BETTER_METRICS",
    "MODEL_INFO_PROFILING_PATH",
    "OVERWRITE_KEY",
    "SMALLER_IS_BETTER",
    "SMALLER_IS_BETTER_METRICS",
    "USE_DSAT_MODE_KEY",
]

CONFIG_KEY = "deepspeed_config"  # the hyperparameter that names the DeepSpeed config
OVERWRITE_KEY = "overwrite_deepspeed_args"  # the hyperparameter whose values overwrite the DeepSpeed config
USE_DSAT_MODE_KEY = MEASURING_KEY  # the hyperparameter that is true in a measuring trial
GAS_DEFAULT = 1  # gradient accumulation steps if a config gives none

SMALLER_IS_BETTER = True  # how a searcher compares its metric by default
SMALLER_IS_BETTER_METRICS = METRICS_TO_MINIMIZE  # times, in microseconds
LARGER_IS_BETTER_METRICS = METRICS_TO_MAXIMIZE  # rates

# Files of ``determined.pytorch.dsat``, which dstrial neither writes nor reads.
ARGS_PKL_PATH = "args.pkl"
MODEL_INFO_PROFILING_PATH = "model_info.json"
AUTOTUNING_RESULTS_PATH = "autotuning_metric.json"


def _method_names() -> tuple[str, ...]:
    from dstrial.dsat.methods import METHOD_NAMES

    return METHOD_NAMES


def _argument_defaults() -> Mapping[str, Any]:
    """Return flag without ``--`` -> default; if methods differ, that of ``predict``."""
    from dstrial.dsat.cli import build_parser

    found: dict[str, Any] = {}
    for method in reversed(_method_names()):
        found |= vars(build_parser("dsat").parse_args([method, "CONFIG.yaml", "MODEL_DIR"]))
    for name in ("given", "search_method", "config_path", "model_dir"):
        del found[name]
    return MappingProxyType({name.replace("_", "-"): value for name, value in found.items()})


def _results_experiment() -> Mapping[str, Any]:
    from dstrial.dsat.backends.trial_spec import RESULTS_EXPERIMENT

    return RESULTS_EXPERIMENT


def _zero_search_space() -> Mapping[int, Mapping[str, tuple[Any, ...]]]:
    """Return ZeRO stage -> key below ``zero_optimization`` -> values."""
    from dstrial.dsat.space.knobs import ALL_STAGES, ZERO, live_knobs

    found = {}
    for stage in ALL_STAGES:
        knobs = live_knobs(stage, is_pipeline=False)
        found[stage] = MappingProxyType({knob.path.removeprefix(f"{ZERO}."): knob.values for knob in knobs})
    return MappingProxyType(found)


_COMPUTED = {
    "ALL_SEARCH_METHOD_NAMES": _method_names,
    "AUTOTUNING_ARG_DEFAULTS": _argument_defaults,
    "DEFAULT_SEARCH_RUNNER_CONFIG": _results_experiment,
    "DEFAULT_ZERO_SEARCH_SPACE": _zero_search_space,
}


def __getattr__(name: str) -> Any:
    if name not in _COMPUTED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = _COMPUTED[name]()
    return value


def get_ds_config_from_hparams(
    hparams: Mapping[str, Any], base_dir: str | os.PathLike[str] = "."
) -> dict[str, Any]:
    """Return the DeepSpeed config that hyperparameters name and overwrite.

    Args:
        hparams: hyperparameters of the trial, not modified. ``deepspeed_config`` is the path of a JSON file or its content;
            ``overwrite_deepspeed_args`` is optional.
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
