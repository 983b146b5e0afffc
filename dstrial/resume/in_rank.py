"""Which checkpoint a run will go on from, known before its trial is built."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from determined import core

from dstrial.errors import CheckpointError
from dstrial.local.run_directory import LOCAL_ID, REWRITE_VARIABLE
from dstrial.resume.metadata import RESUME_VARIABLE, SavedRun


def trial_id_of(info: Any, *, is_mirrored: bool) -> int:
    """Return the number by which checkpoints know the trial.

    A run that goes on in another experiment of the master is the same trial to its checkpoints, and so is one that only
    rewrites a checkpoint.

    Args:
        info: the cluster's, None off a cluster.
        is_mirrored: whether everything is kept in a run directory as well.
    """
    rewritten = os.environ.get(REWRITE_VARIABLE)
    if rewritten:
        return int(rewritten)
    return LOCAL_ID if info is None or is_mirrored else int(info.trial.trial_id)


def resumed_run(
    core_context: core.Context, info: Any, latest_checkpoint: str | None, *, is_mirrored: bool
) -> SavedRun | None:
    """Return what the checkpoint says from which this very run goes on.

    Args:
        core_context: entered.
        info: the cluster's, None off a cluster.
        latest_checkpoint: a uuid, a directory, or off a cluster ``latest``; None leaves it to the cluster or the launcher.
        is_mirrored: as for :func:`trial_id_of`.

    Returns:
        None for a new run, for a checkpoint of another trial, of which only the weights are taken over, and for one that
        cannot be read: loading it says why.

    Ranks: all, collectively (one broadcast, where there is a checkpoint).
    """
    asked = latest_checkpoint
    if info is not None:
        asked = asked or info.latest_checkpoint or (os.environ.get(RESUME_VARIABLE) if is_mirrored else None)
    else:
        asked = asked or os.environ.get(RESUME_VARIABLE)
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
