"""The identity by which loggers know a run.

It is the same for every attempt at a run and differs from that of every other run. It follows from when a run directory was
created, or from the number of a master's trial; a fork has another number.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import platformdirs

from dstrial.config.secrets import SecretNames, masked
from dstrial.errors import DstrialError
from dstrial.local.json_files import read_json
from dstrial.local.run_directory import RUN_DIR_VARIABLE, RunDirectory, experiment_slug
from dstrial.loggers.logger import LoggedRun
from dstrial.runtime import cluster_info
from dstrial.trial.runtime import TrialRuntime


def logged_run(runtime: TrialRuntime) -> LoggedRun:
    """Return what loggers receive of a trial. Ranks: the chief; no communication."""
    config = dict(runtime.exp_conf or {})
    config.pop("hyperparameters", None)
    info = cluster_info()
    directory = _run_directory(runtime, info)
    name = str(
        config.get("name") or (None if directory is None else directory.read_record().name) or "dstrial"
    )
    if directory is not None:
        own, group, identity = directory.path.name, name, f"run {directory.read_record().started} {name}"
        files, store = directory.path, _all_runs(directory, name)
    else:
        assert info is not None, "a trial has a run directory or a master"
        experiment, trial = info.trial.experiment_id, info.trial.trial_id
        own, group = f"trial {trial}", f"{name} (experiment {experiment})"
        identity = f"cluster {info.cluster_id} trial {trial}"
        store = Path(platformdirs.user_data_dir("dstrial")) / "loggers"
        files = store / f"{info.cluster_id}-{trial}"
    run_id = hashlib.sha256(identity.encode()).hexdigest()[:16]
    return LoggedRun(
        run_id=run_id,
        name=own,
        group=group,
        project=name,
        hyperparameters=masked(dict(runtime.hparams or {}), SecretNames()),
        config=masked(config, SecretNames()),
        directory=files,
        store=store,
    )


def _run_directory(runtime: TrialRuntime, info: Any) -> RunDirectory | None:
    """Return the run directory whose run this is; None for a master's trial."""
    if info is None:
        found: RunDirectory = runtime.core.run_directory
        return found
    path = os.environ.get(RUN_DIR_VARIABLE)
    if not path or not runtime.is_mirrored:
        return None
    directory = RunDirectory.open(path)
    try:
        submitted = (read_json(directory.submission_path) or {}).get("experiment_id")
    except DstrialError:
        submitted = None
    # A fork of the experiment has its variables, and is another run; 0 stands there until the master has answered.
    return directory if submitted in (None, 0, info.trial.experiment_id) else None


def _all_runs(directory: RunDirectory, name: str) -> Path:
    """Return the directory of all runs, or the run's own if it lies elsewhere."""
    parent = directory.path.parent
    return parent.parent if parent.name == experiment_slug(name) else directory.path
