"""dsat: tune the DeepSpeed configuration of an experiment.

``python3 -m dstrial.dsat METHOD CONFIG.yaml MODEL_DIR`` is the command. The names here are those of
``determined.pytorch.dsat``, resolved at first use: importing this package imports neither torch,
deepspeed nor transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dstrial.dsat.core.outcome import METRIC_NAMES
from dstrial.lazy_names import lazily

if TYPE_CHECKING:
    from dstrial.dsat.compat import (
        ALL_SEARCH_METHOD_NAMES,
        AUTOTUNING_ARG_DEFAULTS,
        CONFIG_KEY,
        DEFAULT_ZERO_SEARCH_SPACE,
        GAS_DEFAULT,
        LARGER_IS_BETTER_METRICS,
        OVERWRITE_KEY,
        SMALLER_IS_BETTER_METRICS,
        USE_DSAT_MODE_KEY,
        get_ds_config_from_hparams,
    )
    from dstrial.dsat.rank.context import dsat_reporting_context
    from dstrial.integrations.huggingface.hf_args import get_hf_args_with_overwrites

__all__ = [
    # what a script calls
    "dsat_reporting_context",
    "get_ds_config_from_hparams",
    "get_hf_args_with_overwrites",
    # names and defaults; all others are in dstrial.dsat.compat
    "ALL_SEARCH_METHOD_NAMES",
    "AUTOTUNING_ARG_DEFAULTS",
    "CONFIG_KEY",
    "DEFAULT_ZERO_SEARCH_SPACE",
    "GAS_DEFAULT",
    "LARGER_IS_BETTER_METRICS",
    "METRIC_NAMES",
    "OVERWRITE_KEY",
    "SMALLER_IS_BETTER_METRICS",
    "USE_DSAT_MODE_KEY",
]

_HOMES = {
    **{name: "dstrial.dsat.compat" for name in __all__ if name != "METRIC_NAMES"},
    "dsat_reporting_context": "dstrial.dsat.rank.context",
    "get_hf_args_with_overwrites": "dstrial.integrations.huggingface.hf_args",
}

__getattr__ = lazily(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
