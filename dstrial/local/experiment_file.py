"""How ranks learn off a cluster of their experiment: from their launcher's file, or from dsat's variable."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

EXPERIMENT_VARIABLE = "DSTRIAL_EXPERIMENT"
"""Environment variable with the path of a JSON file that holds an experiment config and its hyperparameters."""


@dataclasses.dataclass(frozen=True, slots=True)
class KnownExperiment:
    """What a script's launcher was told.

    Attributes:
        config: the whole experiment config with defaults.
        hyperparameters: value by name.
    """

    config: dict[str, Any]
    hyperparameters: dict[str, Any]


def write_experiment(path: Path, config: Mapping[str, Any], hyperparameters: Mapping[str, Any]) -> None:
    """Write the file that ``EXPERIMENT_VARIABLE`` is to name."""
    text = json.dumps({"config": config, "hyperparameters": hyperparameters}, default=str)
    path.write_text(text, encoding="utf-8")


def read_experiment(environ: Mapping[str, str] | None = None) -> KnownExperiment | None:
    """Return the experiment that this rank's launcher was given; None if it was given none.

    Args:
        environ: environment variables; this process's if left out.
    """
    path = (os.environ if environ is None else environ).get(EXPERIMENT_VARIABLE)
    if not path:
        return None
    values = json.loads(Path(path).read_text(encoding="utf-8"))
    return KnownExperiment(values["config"], values["hyperparameters"])


HPARAMS_VARIABLE = "DSTRIAL_DSAT_HPARAMS"
"""Environment variable with all hyperparameters, as JSON."""


STAND_IN_CLUSTER = "dstrial-without-a-master"
"""``cluster_id`` of the cluster info that a script on this machine is told, where there is no cluster."""

MEASURING_KEY = "_use_dsat_mode"
"""Hyperparameter that is true in a trial which only measures how fast it trains, on a master or without one."""


def is_measuring(hparams: Mapping[str, Any]) -> bool:
    """Say whether these are the hyperparameters of a measuring trial, which is ended once enough of its steps are timed."""
    return bool(hparams.get(MEASURING_KEY))


def measuring_hyperparameters() -> dict[str, Any] | None:
    """Return the hyperparameters of a measuring trial without a master; None in any other process.

    Ranks: any; no communication.
    """
    text = os.environ.get(HPARAMS_VARIABLE)
    if not text:
        return None
    found: dict[str, Any] = json.loads(text)
    return found
