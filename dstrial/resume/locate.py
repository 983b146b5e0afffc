"""Find the checkpoint that a run resumes from, before anything of it is loaded.

Before the ranks start: ``saved_run_to_resume`` off a cluster, ``resumption_problems`` and ``saved_run_of_trial`` for a cluster's
trial. In the ranks of both: ``resumed_run``.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dstrial.config.deepspeed_source import deepspeed_configs
from dstrial.config.dotted_keys import dstrial_section
from dstrial.errors import CheckpointError, ConfigProblem, DstrialError
from dstrial.local.checkpoint_directory import newest_checkpoint
from dstrial.local.run_directory import LOCAL_ID, REWRITE_VARIABLE, RUN_DIR_VARIABLE, RunDirectory
from dstrial.resume.manifest import read_saved_run
from dstrial.resume.metadata import RESUME_VARIABLE, SavedRun
from dstrial.resume.rules import resume_problems

if TYPE_CHECKING:
    from determined import core


def saved_run_to_resume(
    resume: str | None = None, run_dir: Path | None = None, environ: Mapping[str, str] | None = None
) -> SavedRun | None:
    """Return the saved run that starting ranks resume from.

    ``resume`` is a uuid, a directory, or ``latest``; the environment has what is left out. None for a new run, and if the
    checkpoint cannot be found or read: the ranks say so when they load it.
    """
    variables = os.environ if environ is None else environ
    asked = resume or variables.get(RESUME_VARIABLE)
    directory = run_dir or variables.get(RUN_DIR_VARIABLE)
    if not asked:
        return None
    path: Path | None = Path(asked)
    try:
        if directory and (asked == "latest" or len(Path(asked).parts) == 1):
            checkpoints_path = RunDirectory.open(directory).checkpoints_path
            newest = newest_checkpoint(checkpoints_path) if asked == "latest" else None
            path = checkpoints_path / asked if asked != "latest" else None if newest is None else newest.path
        own_id = int(variables.get(REWRITE_VARIABLE) or LOCAL_ID)
        return None if path is None else read_saved_run(path).of_trial(own_id)
    except DstrialError:
        return None


def resumption_problems(
    config: Mapping[str, Any],
    hyperparameters: Mapping[str, Any],
    *,
    num_slots: int,
    trial_id: int,
    latest_checkpoint: str | None,
    context_dir: Path | None = None,
) -> list[ConfigProblem]:
    """Return what keeps a cluster's trial from resuming from ``latest_checkpoint``.

    Only a checkpoint whose directory is on this machine is looked at; the ranks compare every other one. ``num_slots`` counts
    ranks on all machines. Without ``context_dir`` it is the current directory.
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
    """Return the saved run of a cluster's trial; None if it is new or not here."""
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


def trial_id_of(info: Any, *, is_mirrored: bool) -> int:
    """Return the number by which checkpoints know the trial.

    A run that is resumed in another experiment of the master, or only rewrites a checkpoint, is the same trial to its
    checkpoints.
    """
    rewritten = os.environ.get(REWRITE_VARIABLE)
    if rewritten:
        return int(rewritten)
    return LOCAL_ID if info is None or is_mirrored else int(info.trial.trial_id)


def asked_checkpoint(info: Any, given: str | None, *, is_mirrored: bool) -> str | None:
    """Return the checkpoint that a run was asked to resume from.

    A uuid, a directory, or off a cluster ``latest``; None for a new run. What the caller was ``given`` counts first.
    """
    asked = given or (None if info is None else info.latest_checkpoint)
    if not asked and (info is None or is_mirrored):
        asked = os.environ.get(RESUME_VARIABLE)
    return asked or None


def resumed_run(
    core_context: core.Context, info: Any, latest_checkpoint: str | None, *, is_mirrored: bool
) -> SavedRun | None:
    """Return the saved run that this very run resumes from, or None.

    None for a new run, for a checkpoint of another trial, which gives weights only, and for one that cannot be read: loading it
    says why. ``latest_checkpoint`` is a uuid, a directory, or off a cluster ``latest``.

    Ranks: all, collectively.
    """
    asked = asked_checkpoint(info, latest_checkpoint, is_mirrored=is_mirrored)
    if asked is None:
        return None
    found: SavedRun | None = None
    if core_context.distributed.rank == 0:
        with contextlib.suppress(CheckpointError):
            if asked == "latest" and info is None:
                newest = core_context.checkpoint.newest()
                asked = None if newest is None else str(newest.uuid)
            if asked is not None:
                found = SavedRun.from_metadata(asked, core_context.checkpoint.get_metadata(asked))
    found = core_context.distributed.broadcast(found)
    if found is None or found.trial_id != trial_id_of(info, is_mirrored=is_mirrored):
        return None
    return found
