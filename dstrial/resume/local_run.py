"""Find the checkpoint of a run off a cluster before anything of it is loaded."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from dstrial.errors import DstrialError
from dstrial.local.checkpoint_directory import newest_checkpoint
from dstrial.local.run_directory import LOCAL_ID, REWRITE_VARIABLE, RUN_DIR_VARIABLE, RunDirectory
from dstrial.resume.manifest import read_saved_run
from dstrial.resume.metadata import RESUME_VARIABLE, SavedRun


def saved_run_to_resume(
    resume: str | None = None, run_dir: Path | None = None, environ: Mapping[str, str] | None = None
) -> SavedRun | None:
    """Return what the checkpoint says that starting ranks go on from.

    Resume (a uuid, a directory, or ``latest``) and run directory are the environment's if left out, which is this process's.

    Returns:
        None for a new run, and where a checkpoint cannot be found or read: the ranks say so when they load it.
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
