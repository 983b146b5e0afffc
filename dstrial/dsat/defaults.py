"""The constants of ``determined.pytorch.dsat.defaults``, with the values that they have here. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from dstrial.dsat.arguments import build_parser
from dstrial.dsat.knobs import ALL_STAGES, ZERO, live_knobs
from dstrial.dsat.methods import METHOD_NAMES
from dstrial.dsat.outcome import METRICS_TO_MAXIMIZE, METRICS_TO_MINIMIZE

CONFIG_KEY = "deepspeed_config"
"""The hyperparameter that names the DeepSpeed config."""
OVERWRITE_KEY = "overwrite_deepspeed_args"
"""The hyperparameter that is merged over it."""
USE_DSAT_MODE_KEY = "_use_dsat_mode"
"""The hyperparameter that is true in a measuring trial."""
GAS_DEFAULT = 1
"""Accumulation where a config gives none."""
ALL_SEARCH_METHOD_NAMES = METHOD_NAMES
"""The methods, the default one first."""

SMALLER_IS_BETTER = True
"""Which way a searcher compares its metric if it is not told."""
SMALLER_IS_BETTER_METRICS = METRICS_TO_MINIMIZE
"""Metrics that are times, in microseconds."""
LARGER_IS_BETTER_METRICS = METRICS_TO_MAXIMIZE
"""Metrics that are rates."""

ARGS_PKL_PATH = "args.pkl"
"""Where the old tool kept its arguments; here they are those of the command, and nothing is pickled."""
MODEL_INFO_PROFILING_PATH = "model_info.json"
"""Where DeepSpeed's own profile goes in a trial of the old tool; here what is found is among the metrics."""
AUTOTUNING_RESULTS_PATH = "autotuning_metric.json"
"""Where DeepSpeed's own measurement goes; here it is not used, for it is that of a single step."""

DEFAULT_ZERO_SEARCH_SPACE: Mapping[int, Mapping[str, tuple[Any, ...]]] = MappingProxyType(
    {
        stage: MappingProxyType(
            {knob.path.removeprefix(f"{ZERO}."): knob.values for knob in live_knobs(stage, is_pipeline=False)}
        )
        for stage in ALL_STAGES
    }
)
"""ZeRO stage -> key below ``zero_optimization`` -> values that are tried; each stage with all of its keys."""

_NO_FLAGS = frozenset({"given", "search_method", "config_path", "model_dir"})


def _argument_defaults() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for method in reversed(METHOD_NAMES):
        found |= vars(build_parser("dsat").parse_args([method, "CONFIG.yaml", "MODEL_DIR"]))
    return {name.replace("_", "-"): value for name, value in found.items() if name not in _NO_FLAGS}


AUTOTUNING_ARG_DEFAULTS: Mapping[str, Any] = MappingProxyType(_argument_defaults())
"""Flag without its dashes -> default; where methods differ, that of ``predict``."""

DEFAULT_SEARCH_RUNNER_CONFIG: Mapping[str, Any] = MappingProxyType(
    {
        "searcher": {"name": "single", "max_length": {"batches": 1}},
        "max_restarts": 0,
        "resources": {"slots_per_trial": 0},
        "entrypoint": "python3 -m dstrial.dsat.keep",
    }
)
"""What is submitted beside the trials of a search: here the experiment whose checkpoint holds the results of launched trials."""
