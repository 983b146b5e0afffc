"""Hyperparameters of a measuring trial: dsat sets them, ranks read them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

HPARAMS_VARIABLE = "DSTRIAL_DSAT_HPARAMS"
"""Environment variable with all hyperparameters, as JSON."""

RESULT_VARIABLE = "DSTRIAL_DSAT_RESULT"
"""Environment variable with the file into which a measuring trial without a master writes its metrics."""

STAND_IN_CLUSTER = "dstrial-without-a-master"
"""``cluster_id`` of the cluster info that a script on this machine is told, where there is no cluster."""

MEASURING_KEY = "_use_dsat_mode"
"""Hyperparameter that is true in a trial which only measures how fast it trains, on a master or without one."""

SETTINGS_KEY = "_dsat"
"""Hyperparameter with the settings of a measurement, beside ``_use_dsat_mode``."""

BENCHMARK_KEY = "benchmarks_machine"
"""In those settings: whether the measurement reports what its machine can do, too."""

AROUND_FIT_KEY = "_around_fit"
"""Hyperparameter by which whoever starts a trial to watch it has its own code around every ``Trainer.fit``.

``module:function``, a context manager that is given the core context. Entered on all ranks.
"""

MEASURING_KEYS = frozenset({MEASURING_KEY, SETTINGS_KEY, AROUND_FIT_KEY})
"""What a measuring trial has, and a training one has not."""


def is_measuring(hparams: Mapping[str, Any]) -> bool:
    """Say whether hyperparameters are a measuring trial's."""
    # It is ended once enough of its steps are timed.
    return bool(hparams.get(MEASURING_KEY))


def measuring_hyperparameters() -> dict[str, Any] | None:
    """Return a measuring trial's hyperparameters without a master; else None.

    Ranks: any; no communication.
    """
    text = os.environ.get(HPARAMS_VARIABLE)
    if not text:
        return None
    found: dict[str, Any] = json.loads(text)
    return found
