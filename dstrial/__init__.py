"""Determined-style trials for DeepSpeed, on any machine, by ``pip install`` alone.

The names are those of ``determined.pytorch.deepspeed`` 0.38.1, so that a trial only needs to change its import.
Names are resolved lazily: importing this package imports neither torch nor deepspeed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dstrial import collector, harness_paths
from dstrial.lazy_names import lazily

__version__ = "0.1.0"

if TYPE_CHECKING:
    from attrdict import AttrDict
    from determined.pytorch import (
        Batch,
        Epoch,
        MetricReducer,
        PyTorchCallback,
        Reducer,
        TorchData,
        TrainUnit,
        samplers,
    )

    from dstrial.config.merge import overwrite_deepspeed_config
    from dstrial.errors import ConfigError, DstrialError
    from dstrial.loop.boundaries import FitResult
    from dstrial.results import runs
    from dstrial.runtime import core_context
    from dstrial.trainer import Trainer, init
    from dstrial.trial.context import DeepSpeedTrialContext
    from dstrial.trial.device_transfer import DataLoader
    from dstrial.trial.runtime import (
        ModelParallelUnit,
        make_data_parallel_mpu,
        make_deepspeed_mpu,
    )
    from dstrial.trial.trial import DeepSpeedTrial

__all__ = [
    # base classes and functions for trial files
    "DeepSpeedTrial",
    "DeepSpeedTrialContext",
    "ModelParallelUnit",
    "make_data_parallel_mpu",
    "make_deepspeed_mpu",
    "overwrite_deepspeed_config",
    # running a trial
    "init",
    "Trainer",
    "FitResult",
    # results of runs as data
    "runs",
    # core context for scripts that have their own training loop
    "core_context",
    # Determined's DataLoader, with pinned memory if there is an accelerator
    "DataLoader",
    # re-exported from Determined, unchanged
    "Batch",
    "Epoch",
    "TrainUnit",
    "TorchData",
    "samplers",
    "PyTorchCallback",
    "MetricReducer",
    "Reducer",
    # from the module attrdict
    "AttrDict",
    # errors
    "DstrialError",
    "ConfigError",
    "__version__",
]

_HOMES = {
    "AttrDict": "attrdict",
    "Batch": "determined.pytorch",
    "ConfigError": "dstrial.errors",
    "DataLoader": "dstrial.trial.device_transfer",
    "DeepSpeedTrial": "dstrial.trial.trial",
    "DeepSpeedTrialContext": "dstrial.trial.context",
    "DstrialError": "dstrial.errors",
    "Epoch": "determined.pytorch",
    "FitResult": "dstrial.loop.boundaries",
    "MetricReducer": "determined.pytorch",
    "ModelParallelUnit": "dstrial.trial.runtime",
    "PyTorchCallback": "determined.pytorch",
    "Reducer": "determined.pytorch",
    "TorchData": "determined.pytorch",
    "TrainUnit": "determined.pytorch",
    "Trainer": "dstrial.trainer",
    "core_context": "dstrial.runtime",
    "init": "dstrial.trainer",
    "make_data_parallel_mpu": "dstrial.trial.runtime",
    "make_deepspeed_mpu": "dstrial.trial.runtime",
    "overwrite_deepspeed_config": "dstrial.config.merge",
    "runs": "dstrial.results",
    "samplers": "determined.pytorch",
}


_resolve = lazily(__name__, _HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'dstrial' has no attribute {name!r}")
    home = _HOMES[name]
    if not home.startswith("dstrial.config") and not home.startswith("dstrial.errors"):
        with collector.paused():
            process_group = importlib.import_module("dstrial.ranks.process_group")
        # DeepSpeed chooses its accelerator at its first import, so the choice must be prepared before.
        process_group.prepare_accelerator()
    with collector.paused():
        return _resolve(name)


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))


harness_paths.install_outside_of_allocations()
