"""Event-file directories that a TensorBoard task reads.

Running trials upload event files every few seconds, so TensorBoard reads the storage directly, without copies, and also shows
trials that start later.

Source: Determined 0.38.1 determined/tensorboard/build.py (paths), `det tensorboard start --help` (at most the 100 best trials
of an experiment).
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

from dstrial.errors import MasterError
from dstrial.master.lifecycle import checkpoint_gc
from dstrial.master.store import experiments, trials
from dstrial.master.store.database import Connection
from dstrial.master.store.errors import InvalidError

MAX_TRIALS = 100


def sources(
    connection: Connection,
    cluster_id: str,
    experiment_ids: Collection[int],
    trial_ids: Collection[int],
) -> dict[str, Path]:
    """Return run name -> event directory; directories need not exist yet."""
    if not experiment_ids and not trial_ids:
        raise InvalidError(
            "experimentIds and trialIds are empty; expected what to show. Name an experiment, or trials with -t."
        )
    if len(trial_ids) > MAX_TRIALS:
        raise InvalidError(
            f"trialIds has {len(trial_ids)} items; expected at most {MAX_TRIALS}. Name fewer, or the experiment."
        )
    found: dict[str, Path] = {}
    for experiment_id in experiment_ids:
        directory = _directory(connection, cluster_id, experiment_id)
        chosen = _best_trials(connection, experiment_id)
        if chosen is None:
            found[f"experiment-{experiment_id}"] = directory
        for trial_id in chosen or ():
            found[f"experiment-{experiment_id}-trial-{trial_id}"] = directory / "trial" / str(trial_id)
    for trial_id in trial_ids:
        row = trials.require(connection, trial_id)
        directory = _directory(connection, cluster_id, row.experiment_id)
        found[f"trial-{trial_id}"] = directory / "trial" / str(trial_id)
    return found


def _directory(connection: Connection, cluster_id: str, experiment_id: int) -> Path:
    config = json.loads(experiments.require(connection, experiment_id).config)
    try:
        return checkpoint_gc.tensorboard_directory(config["checkpoint_storage"], cluster_id, experiment_id)
    except MasterError as error:
        kind = config["checkpoint_storage"].get("type")
        raise InvalidError(
            f"checkpoint_storage.type of experiment {experiment_id} is {kind!r}; expected shared_fs or directory, whose "
            "event files this machine has. Fetch them with the storage's own tools, and run `tensorboard --logdir`."
        ) from error


def _best_trials(connection: Connection, experiment_id: int) -> list[int] | None:
    """Return the trials to show if there are too many; None for all, also later ones."""
    found = trials.best_ids(connection, experiments.require(connection, experiment_id), MAX_TRIALS + 1)
    return None if len(found) <= MAX_TRIALS else found[:MAX_TRIALS]
