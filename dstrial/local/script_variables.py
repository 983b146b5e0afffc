"""Environment variables and files with which launchers and dsat configure ranks."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Environment variable with the path of a JSON file that holds an experiment config and its hyperparameters.
EXPERIMENT_VARIABLE = "DSTRIAL_EXPERIMENT"


@dataclasses.dataclass(frozen=True, slots=True)
class KnownExperiment:
    """Experiment config (defaults filled in) and hyperparameters from the launcher."""

    config: dict[str, Any]
    hyperparameters: dict[str, Any]


def write_experiment(path: Path, config: Mapping[str, Any], hyperparameters: Mapping[str, Any]) -> None:
    """Write config and hyperparameters to ``path`` as JSON, for the ranks to read.

    The ranks find the path in the environment variable ``EXPERIMENT_VARIABLE``.
    """
    text = json.dumps({"config": config, "hyperparameters": hyperparameters}, default=str)
    path.write_text(text, encoding="utf-8")


def read_experiment() -> KnownExperiment | None:
    """Return the config and hyperparameters that the launcher wrote for the ranks.

    The environment variable ``EXPERIMENT_VARIABLE`` has the file's path. None if the variable is not set.
    """
    path = os.environ.get(EXPERIMENT_VARIABLE)
    if not path:
        return None
    values = json.loads(Path(path).read_text(encoding="utf-8"))
    return KnownExperiment(values["config"], values["hyperparameters"])


# ---- trials that dsat measures ----------------------------------------------------------------------

HPARAMS_VARIABLE = "DSTRIAL_DSAT_HPARAMS"  # JSON: hyperparameters of a measuring trial without a master
RESULT_VARIABLE = "DSTRIAL_DSAT_RESULT"  # file into which a measuring trial without a master writes metrics
# ``cluster_id`` in the cluster info that dsat makes for a script without a master.
STAND_IN_CLUSTER = "dstrial-without-a-master"

MEASURING_KEY = "_use_dsat_mode"  # hyperparameter, true in a trial that only measures its speed
SETTINGS_KEY = "_dsat"  # hyperparameter with the settings of the measurement
BENCHMARK_KEY = "benchmarks_machine"  # key of the settings: whether the trial also measures the machine
# Hyperparameter ``module:function``. The function takes the core context; its context manager surrounds ``Trainer.fit``.
AROUND_FIT_KEY = "_around_fit"
# Hyperparameters that dsat adds to trials.
MEASURING_KEYS = frozenset({MEASURING_KEY, SETTINGS_KEY, AROUND_FIT_KEY})


def is_measuring(hparams: Mapping[str, Any]) -> bool:
    """Return whether the hyperparameters belong to a trial that only measures speed.

    The autotuner (dsat) starts such trials.
    """
    return bool(hparams.get(MEASURING_KEY))


def measuring_hyperparameters() -> dict[str, Any] | None:
    """Return the hyperparameters of an autotuner's trial that runs without a master.

    None in every other process.
    """
    text = os.environ.get(HPARAMS_VARIABLE)
    if not text:
        return None
    found: dict[str, Any] = json.loads(text)
    return found
