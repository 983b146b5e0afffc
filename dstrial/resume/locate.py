"""Find the checkpoint that a run resumes from, and read the run that wrote it.

Before ranks start, use ``saved_run_of_trial`` for a trial of a master (of Determined or dstrial), and ``saved_run_to_resume``
for a run without a master. In the ranks, use ``resumed_run``.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dstrial.checkpoint.manifest import read_saved_run
from dstrial.config.deepspeed_source import deepspeed_configs
from dstrial.config.dotted_keys import dstrial_section
from dstrial.errors import CheckpointError, ConfigProblem, DstrialError
from dstrial.local.checkpoint_directory import newest_checkpoint
from dstrial.local.run_directory import LOCAL_ID, REWRITE_VARIABLE, RUN_DIR_VARIABLE, RunDirectory
from dstrial.resume.metadata import RESUME_VARIABLE, SavedRun
from dstrial.resume.plan import resume_problems

if TYPE_CHECKING:
    from determined import core


def saved_run_to_resume(resume: str | None = None, run_dir: Path | None = None) -> SavedRun | None:
    """Return the saved run that a run without a master will resume from.

    Return None for a new run. Also return None if the checkpoint is missing or unreadable: loading in the ranks then raises
    the error.

    Args:
        resume: a checkpoint's uuid, a directory, or ``latest``; None means the environment variable ``DSTRIAL_RESUME``.
        run_dir: the run directory, in which a uuid or ``latest`` is searched for; None means ``DSTRIAL_RUN_DIR``.
    """
    asked = resume or os.environ.get(RESUME_VARIABLE)
    directory = run_dir or os.environ.get(RUN_DIR_VARIABLE)
    if not asked:
        return None
    path: Path | None = Path(asked)
    try:
        if directory and (asked == "latest" or len(Path(asked).parts) == 1):
            checkpoints_path = RunDirectory.open(directory).checkpoints_path
            newest = newest_checkpoint(checkpoints_path) if asked == "latest" else None
            path = checkpoints_path / asked if asked != "latest" else None if newest is None else newest.path
        own_id = int(os.environ.get(REWRITE_VARIABLE) or LOCAL_ID)
        return None if path is None else read_saved_run(path).of_trial(own_id)
    except DstrialError:
        return None


def saved_run_of_trial(info: Any) -> SavedRun | None:
    """Return the saved run that a master's trial resumes from.

    Return None if the trial is new, or if the checkpoint's directory is missing on this machine or unreadable. Checksums are
    not verified until the ranks load the checkpoint. ``info`` is Determined's cluster info.
    """
    storage = info.trial._config.get("checkpoint_storage") or {}
    run_dir = os.environ.get(RUN_DIR_VARIABLE)
    is_mirrored = bool(run_dir)
    path: Path | None = None
    if info.latest_checkpoint is not None:
        if run_dir:  # the run directory has at least the checkpoint's metadata
            path = RunDirectory(Path(run_dir)).checkpoints_path / info.latest_checkpoint
        elif storage.get("type") == "directory" and storage.get("container_path"):
            path = Path(storage["container_path"]) / info.latest_checkpoint
    elif is_mirrored and os.environ.get(RESUME_VARIABLE):
        path = Path(os.environ[RESUME_VARIABLE])
    if path is None or not path.is_dir():
        return None
    try:
        return read_saved_run(path).of_trial(LOCAL_ID if is_mirrored else int(info.trial.trial_id))
    except CheckpointError:
        return None


def resumption_problems(info: Any, context_dir: Path | None = None) -> list[ConfigProblem]:
    """Return problems that prevent a master's trial from resuming on its slots.

    Return [] if the trial does not resume, or if its checkpoint is not readable on this machine. ``info`` is Determined's
    cluster info. Paths of DeepSpeed configs are relative to ``context_dir``, by default the current directory.
    """
    saved = saved_run_of_trial(info)
    if saved is None:
        return []
    return resume_problems(
        saved,
        num_slots=max(sum(info.container_slot_counts), 1),
        extents=dstrial_section(info.trial._config),
        configs=deepspeed_configs(info.trial.hparams, context_dir or Path()),
        slots_key="the number of ranks",
    )


def trial_id_of(info: Any, *, is_mirrored: bool) -> int:
    """Return the trial id that this run's checkpoints record.

    Under a master, this is the trial's id; without a master, ``LOCAL_ID``. Under ``dstrial run`` it is ``LOCAL_ID`` too, so
    that the run can resume in another experiment. A run that only loads a checkpoint and saves it again
    (``REWRITE_VARIABLE``) uses the checkpoint's id.

    Args:
        info: Determined's cluster info; None without a master.
        is_mirrored: whether ``dstrial run`` started the run.
    """
    rewritten = os.environ.get(REWRITE_VARIABLE)
    if rewritten:
        return int(rewritten)
    return LOCAL_ID if info is None or is_mirrored else int(info.trial.trial_id)


def asked_checkpoint(info: Any, given: str | None, *, is_mirrored: bool) -> str | None:
    """Return the checkpoint that a run must resume from; None for a new run.

    The result is a uuid, a directory, or (only without a master) ``latest``.

    Args:
        info: Determined's cluster info, whose latest checkpoint is used if ``given`` is None; None without a master.
        given: the checkpoint that the caller of ``init`` or ``fit`` requests; None if not requested.
        is_mirrored: whether ``dstrial run`` started the run. Then, and without a master, ``DSTRIAL_RESUME`` is the last choice.
    """
    asked = given or (None if info is None else info.latest_checkpoint)
    if not asked and (info is None or is_mirrored):
        asked = os.environ.get(RESUME_VARIABLE)
    return asked or None


def resumed_run(
    core_context: core.Context, info: Any, latest_checkpoint: str | None, *, is_mirrored: bool
) -> SavedRun | None:
    """Return the saved run that this run resumes from, if it is of the same trial.

    Return None for a new run, or for a checkpoint of another trial, of which only the weights will be loaded. Also return None
    for an unreadable checkpoint; loading in the ranks then raises the error.

    ``latest_checkpoint`` is a uuid, a directory, or (only without a master) ``latest``. None means the checkpoint of ``info``
    or the environment.

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
