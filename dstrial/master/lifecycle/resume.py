"""Find a trial's checkpoint and the slot counts on which the trial can resume.

The module reads only database rows and checkpoints' manifests. A trial can resume from a dstrial checkpoint on any slot count
that divides the global batch size, which does not change. So a trial need not wait for ``slots_per_trial`` slots.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dstrial.checkpoint.manifest import read_saved_run
from dstrial.config.dotted_keys import dstrial_section
from dstrial.config.experiment_config.entrypoint import trial_spec
from dstrial.errors import CheckpointError
from dstrial.master.store import checkpoints as checkpoint_rows
from dstrial.master.store import jobs
from dstrial.master.store.checkpoints import Checkpoint
from dstrial.master.store.database import Connection
from dstrial.master.store.trials import Trial
from dstrial.resume.metadata import RESUME_VARIABLE, SavedRun
from dstrial.resume.plan import resumable_slots

# Launchers that start one rank per slot; another command may start any number of ranks.
_LAUNCHERS = ("dstrial.launch", "determined.launch.")
# Trial id of checkpoints in the run directory of `dstrial run`.
_LOCAL_TRIAL_ID = 0


def of_trial(connection: Connection, trial: Trial) -> SavedRun | None:
    """Return the metadata of the checkpoint from which a trial resumes, or None.

    This is the trial's latest checkpoint, else that of its warm start. None if neither exists, or dstrial did not write it.
    """
    latest = checkpoint_rows.latest_completed(connection, trial.id)
    if latest is not None:
        return _read(latest)
    return of_warm_start(connection, trial.warm_start_uuid)


def of_warm_start(connection: Connection, uuid: str | None) -> SavedRun | None:
    """Return the metadata of a checkpoint whose weights initialise a new trial.

    None if ``uuid`` is None or not in the database, or if dstrial did not write the checkpoint.
    """
    row = None if uuid is None else checkpoint_rows.get_checkpoint(connection, uuid)
    saved = None if row is None else _read(row)
    return None if saved is None else saved.of_trial(-1)


def of_submission(connection: Connection, config: Mapping[str, Any]) -> SavedRun | None:
    """Return the metadata of the checkpoint from which a submitted config starts.

    None if the trial starts without a checkpoint, or dstrial did not write the checkpoint.
    """
    saved = _of_run_directory(config)
    if saved is not None:
        return saved
    searcher = config.get("searcher")
    if not isinstance(searcher, Mapping):
        return None
    uuid = searcher.get("source_checkpoint_uuid")
    source = searcher.get("source_trial_id")
    if isinstance(source, int):
        latest = checkpoint_rows.latest_completed(connection, source)
        uuid = None if latest is None else latest.uuid
    return of_warm_start(connection, None if uuid is None else str(uuid))


def _of_run_directory(config: Mapping[str, Any]) -> SavedRun | None:
    """Return the metadata of the checkpoint of ``dstrial run --resume``, or None.

    The checkpoint's path is the value of ``RESUME_VARIABLE`` among the environment variables in ``config``.
    """
    environment = config.get("environment")
    variables = environment.get("environment_variables") if isinstance(environment, Mapping) else None
    if isinstance(variables, Mapping):
        variables = variables.get("cpu")
    if not isinstance(variables, list):
        return None
    # partition() splits NAME=value into three parts; drop the middle one.
    path = dict(str(variable).partition("=")[::2] for variable in variables).get(RESUME_VARIABLE)
    if not path or not Path(path).is_absolute():
        return None
    try:
        return read_saved_run(path).of_trial(_LOCAL_TRIAL_ID)
    except CheckpointError:
        return None


def _read(row: Checkpoint) -> SavedRun | None:
    return SavedRun.from_metadata(str(row.uuid), json.loads(row.metadata))


def choices(
    connection: Connection, trial: Trial, config: Mapping[str, Any], *, at_least: int, at_most: int
) -> tuple[int, ...]:
    """Return the slot counts on which a trial can resume, highest first.

    The counts are between ``at_least`` and ``at_most``. Empty if the trial cannot change its slot count.
    """
    saved = _resizable_run(connection, trial, config)
    if saved is None:
        return ()
    unusable = jobs.unusable_counts(connection, trial.id)
    counts = resumable_slots(saved, at_most=at_most, at_least=at_least, extents=dstrial_section(config))
    return tuple(count for count in counts if count not in unusable)


def _resizable_run(connection: Connection, trial: Trial, config: Mapping[str, Any]) -> SavedRun | None:
    if not follows_slots(config.get("entrypoint")):
        return None
    saved = of_trial(connection, trial) or _of_run_directory(config)
    return saved if saved is not None and saved.keeps_batch and saved.engines else None


def follows_slots(entrypoint: Any) -> bool:
    """Return whether a config's entrypoint starts one rank per slot."""
    words = " ".join(map(str, entrypoint)) if isinstance(entrypoint, list) else str(entrypoint or "")
    return trial_spec(entrypoint) is not None or any(launcher in words for launcher in _LAUNCHERS)
