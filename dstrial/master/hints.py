"""Suggestions that end the master's error messages, mostly commands to run."""

from __future__ import annotations

import enum
from pathlib import Path


class Hint(enum.Enum):
    """A suggestion of what to do, appended to an error message of the database layer."""

    LIST_ALLOCATIONS = "; expected one of `det task list`."
    LIST_CHECKPOINTS = "; expected one of `det experiment list-checkpoints`."
    LIST_EXPERIMENTS = "; expected one of `det experiment list --all`."
    LIST_MODELS = "; expected one of `det model list`."
    LIST_OR_CREATE_PROJECTS = (
        "; expected one of `det project list WORKSPACE`. Make it with `det project create`, or name another."
    )
    LIST_PROJECTS = "; expected one of `det project list WORKSPACE`. Name another."
    LIST_TASKS = " See `det task list`."
    LIST_TEMPLATES = "; expected one of `det template list`. Name another."
    LIST_TOKENS = "; expected one of `det token list`. Name another."
    LIST_TRIALS = "; expected one of `det experiment list-trials`."
    LIST_USERS = "; see `det user list --all`"
    LIST_VERSIONS = "; expected one of `det model list-versions`."
    LIST_WEBHOOKS = "; expected one of `dstrial webhook list`. Name another."
    LIST_WORKSPACES = "; expected one of `det workspace list`. Name another."
    CONTINUE_EXPERIMENT = " Use `det experiment continue` for one that has ended."
    CREATE_PROJECT = " Make one with `det project create`."
    CREATE_WORKSPACE = " Make one with `det workspace create`."
    FORK_TASK = " Fork it with `det task fork`."
    KILL_DETACHED = " Do it where its script runs; `det experiment kill` marks it as canceled."
    MOVE_MODELS = " Move or delete its models first, see `det model list -w`."
    REVOKE_TOKENS = " Revoke some with `det token revoke`."
    SET_TEMPLATE = " Change it with `det template set`."
    TAKE_CHECKPOINT = " Take its uuid from `det experiment list-checkpoints`."
    UNARCHIVE_EXPERIMENT = " Unarchive it with `det experiment unarchive` first."
    UNARCHIVE_PROJECT = (
        " Unarchive it with `det project unarchive` (or `det workspace unarchive`), or name another."
    )
    UNARCHIVE_WORKSPACE = " Unarchive it with `det workspace unarchive`, or name another."


END_AND_PUT_BACK = "End the master with `dstrial down`, and put a copy back with `dstrial restore`."
SEE_COPIES = "see `dstrial restore`"
SEE_LOG = "See what is wrong with `dstrial logs`"
START = "Start its master with `dstrial up`"


def put_back(copy: Path | None, directory: Path) -> str:
    """Return the `dstrial restore` command for a backup, as text in backticks.

    ``copy`` is the path of the backup; if it is None, the text has the placeholder PATH. ``directory`` is the state directory.
    """
    return "`dstrial restore PATH`" if copy is None else f"`dstrial restore {copy} --state-dir {directory}`"
