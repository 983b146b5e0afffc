"""Compare a cluster trial's checkpoint with its config before any rank starts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dstrial.config import SavedRun, resume_problems
from dstrial.config.deepspeed_source import deepspeed_configs
from dstrial.config.dotted_keys import dstrial_section
from dstrial.errors import CheckpointError, ConfigProblem
from dstrial.local.run_directory import LOCAL_ID, RUN_DIR_VARIABLE
from dstrial.resume.manifest import read_saved_run
from dstrial.resume.metadata import RESUME_VARIABLE


def resumption_problems(
    config: Mapping[str, Any],
    hyperparameters: Mapping[str, Any],
    *,
    num_slots: int,
    trial_id: int,
    latest_checkpoint: str | None,
    context_dir: Path | None = None,
) -> list[ConfigProblem]:
    """Return what keeps a trial from going on from its checkpoint.

    Only a checkpoint whose directory is on this machine is looked at; the ranks compare every other one.

    Args:
        config: the experiment config, as the trial has it.
        hyperparameters: the trial's.
        num_slots: ranks that are going to be started, on all machines.
        trial_id: the trial.
        latest_checkpoint: uuid of the checkpoint; None if the trial starts anew.
        context_dir: directory of the model definition; the current one if left out.
    """
    saved = saved_run_of_trial(config, trial_id=trial_id, latest_checkpoint=latest_checkpoint)
    if saved is None:
        return []
    return resume_problems(
        saved,
        num_slots=num_slots,
        extents=dstrial_section(config),
        configs=deepspeed_configs(hyperparameters, context_dir or Path()),
        slots_key="the number of ranks",
    )


def saved_run_of_trial(
    config: Mapping[str, Any], *, trial_id: int, latest_checkpoint: str | None
) -> SavedRun | None:
    """Return what the checkpoint says that a cluster's trial goes on from.

    Returns:
        None for a new trial, and for a checkpoint whose directory is not on this machine.
    """
    is_mirrored = bool(os.environ.get(RUN_DIR_VARIABLE))
    saved = _saved_run(config.get("checkpoint_storage") or {}, latest_checkpoint, is_mirrored=is_mirrored)
    return None if saved is None else saved.of_trial(LOCAL_ID if is_mirrored else trial_id)


def _saved_run(
    storage: Mapping[str, Any], latest_checkpoint: str | None, *, is_mirrored: bool
) -> SavedRun | None:
    path: Path | None = None
    if latest_checkpoint is not None and storage.get("type") == "directory" and storage.get("container_path"):
        path = Path(storage["container_path"]) / latest_checkpoint
    elif latest_checkpoint is None and is_mirrored and os.environ.get(RESUME_VARIABLE):
        path = Path(os.environ[RESUME_VARIABLE])
    if path is None or not path.is_dir():
        return None
    try:
        return read_saved_run(path)
    except CheckpointError:
        # Said with all details by the ranks, which verify every file.
        return None
