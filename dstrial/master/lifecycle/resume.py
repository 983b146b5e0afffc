"""Finds a trial's checkpoint, and the numbers of slots on which it goes on.

Reads rows and manifests only. A trial with a checkpoint of dstrial's keeps its batch on any number of slots that divides it, so
it goes on with fewer slots than ``slots_per_trial`` instead of waiting.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dstrial.config import SavedRun, resume_problems
from dstrial.config.dotted_keys import dstrial_section
from dstrial.config.experiment_config.entrypoint import trial_spec
from dstrial.errors import CheckpointError
from dstrial.master.store import checkpoints as checkpoint_rows
from dstrial.master.store import resizing
from dstrial.master.store.checkpoints import Checkpoint
from dstrial.master.store.database import Connection
from dstrial.master.store.trials import Trial
from dstrial.resume.manifest import read_saved_run
from dstrial.resume.metadata import RESUME_VARIABLE

# The launchers that start as many ranks as there are slots; another command may start any number.
_LAUNCHERS = ("dstrial.launch", "determined.launch.")
# The number by which a run directory's checkpoints know their run, whichever experiment trains it.
_LOCAL_ID = 0


def of_trial(connection: Connection, trial: Trial) -> SavedRun | None:
    """Return the saved run that a trial starts from next; None without one of ours."""
    latest = checkpoint_rows.latest_completed(connection, trial.id)
    if latest is not None:
        return _read(latest)
    return of_warm_start(connection, trial.warm_start_uuid)


def of_warm_start(connection: Connection, uuid: str | None) -> SavedRun | None:
    """Return another trial's saved run, of which only the weights are used."""
    row = None if uuid is None else checkpoint_rows.get_checkpoint(connection, uuid)
    saved = None if row is None else _read(row)
    return None if saved is None else saved.of_trial(-1)


def of_submission(connection: Connection, config: Mapping[str, Any]) -> SavedRun | None:
    """Return the saved run from which an unchecked config's first trial starts."""
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
    """Return the saved run that ``dstrial run --resume`` names in the environment."""
    environment = config.get("environment")
    variables = environment.get("environment_variables") if isinstance(environment, Mapping) else None
    if isinstance(variables, Mapping):
        variables = variables.get("cpu")
    if not isinstance(variables, list):
        return None
    # The three parts of NAME=value, without the middle one.
    path = dict(str(variable).partition("=")[::2] for variable in variables).get(RESUME_VARIABLE)
    if not path or not Path(path).is_absolute():
        return None
    try:
        return read_saved_run(path).of_trial(_LOCAL_ID)
    except CheckpointError:
        return None


def _read(row: Checkpoint) -> SavedRun | None:
    return SavedRun.from_metadata(str(row.uuid), json.loads(row.metadata))


def choices(
    connection: Connection, trial: Trial, config: Mapping[str, Any], *, at_least: int, at_most: int
) -> tuple[int, ...]:
    """Return the numbers of slots for a trial's checkpoint, the most first."""
    saved = _own(connection, trial, config)
    if saved is None:
        return ()
    section = dstrial_section(config)
    unusable = resizing.unusable_counts(connection, trial.id)
    return tuple(
        count
        for count in range(at_most, max(at_least, 1) - 1, -1)
        if count not in unusable and not resume_problems(saved, num_slots=count, extents=section)
    )


def why_it_waits(
    connection: Connection, trial: Trial, config: Mapping[str, Any], num_available: int
) -> str | None:
    """Say why a trial's checkpoint cannot use the available slots; None without one."""
    saved = _own(connection, trial, config)
    if saved is None or num_available < 1:
        return None
    at_least = dstrial_section(config).get("min_slots")
    if isinstance(at_least, int) and at_least > num_available:
        return f"data.dstrial.min_slots is {at_least}"
    problems = resume_problems(
        saved, num_slots=num_available, extents=dstrial_section(config), slots_key="the number of slots"
    )
    return str(problems[0]) if problems else None


def _own(connection: Connection, trial: Trial, config: Mapping[str, Any]) -> SavedRun | None:
    if not follows_slots(config.get("entrypoint")):
        return None
    saved = of_trial(connection, trial) or _of_run_directory(config)
    return saved if saved is not None and saved.keeps_batch and saved.engines else None


def follows_slots(entrypoint: Any) -> bool:
    """Say whether an entrypoint starts as many ranks as its trial has slots."""
    words = " ".join(map(str, entrypoint)) if isinstance(entrypoint, list) else str(entrypoint or "")
    return trial_spec(entrypoint) is not None or any(launcher in words for launcher in _LAUNCHERS)
