"""Off a cluster, a launcher's experiment config as a script's ranks read it."""

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
    """The config, with defaults, and hyperparameters that a launcher gave its script."""

    config: dict[str, Any]
    hyperparameters: dict[str, Any]


def write_experiment(path: Path, config: Mapping[str, Any], hyperparameters: Mapping[str, Any]) -> None:
    """Write the file for ``EXPERIMENT_VARIABLE``."""
    text = json.dumps({"config": config, "hyperparameters": hyperparameters}, default=str)
    path.write_text(text, encoding="utf-8")


def read_experiment(environ: Mapping[str, str] | None = None) -> KnownExperiment | None:
    """Return the experiment of this rank's launcher; None without one."""
    path = (os.environ if environ is None else environ).get(EXPERIMENT_VARIABLE)
    if not path:
        return None
    values = json.loads(Path(path).read_text(encoding="utf-8"))
    return KnownExperiment(values["config"], values["hyperparameters"])
