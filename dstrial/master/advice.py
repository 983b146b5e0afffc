"""Error messages of the store, with hints for users of ``det``."""

from __future__ import annotations

from collections.abc import Mapping

from dstrial.master.store.errors import Hint, StoreError

WORDS: Mapping[Hint, str] = {
    Hint.LIST_ALLOCATIONS: "; expected one of `det task list`.",
    Hint.LIST_CHECKPOINTS: "; expected one of `det experiment list-checkpoints`.",
    Hint.LIST_EXPERIMENTS: "; expected one of `det experiment list --all`.",
    Hint.LIST_MODELS: "; expected one of `det model list`.",
    Hint.LIST_OR_CREATE_PROJECTS: (
        "; expected one of `det project list WORKSPACE`. Make it with `det project create`, or name another."
    ),
    Hint.LIST_PROJECTS: "; expected one of `det project list WORKSPACE`. Name another.",
    Hint.LIST_TASKS: " See `det task list`.",
    Hint.LIST_TEMPLATES: "; expected one of `det template list`. Name another.",
    Hint.LIST_TOKENS: "; expected one of `det token list`. Name another.",
    Hint.LIST_TRIALS: "; expected one of `det experiment list-trials`.",
    Hint.LIST_USERS: "; see `det user list --all`",
    Hint.LIST_VERSIONS: "; expected one of `det model list-versions`.",
    Hint.LIST_WEBHOOKS: "; expected one of `dstrial webhook list`. Name another.",
    Hint.LIST_WORKSPACES: "; expected one of `det workspace list`. Name another.",
    Hint.CONTINUE_EXPERIMENT: " Use `det experiment continue` for one that has ended.",
    Hint.CREATE_PROJECT: " Make one with `det project create`.",
    Hint.CREATE_WORKSPACE: " Make one with `det workspace create`.",
    Hint.FORK_TASK: " Fork it with `det task fork`.",
    Hint.KILL_DETACHED: " Do it where its script runs; `det experiment kill` marks it as canceled.",
    Hint.MOVE_MODELS: " Move or delete its models first, see `det model list -w`.",
    Hint.REVOKE_TOKENS: " Revoke some with `det token revoke`.",
    Hint.SET_TEMPLATE: " Change it with `det template set`.",
    Hint.TAKE_CHECKPOINT: " Take its uuid from `det experiment list-checkpoints`.",
    Hint.UNARCHIVE_EXPERIMENT: " Take it back with `det experiment unarchive` first.",
    Hint.UNARCHIVE_PROJECT: (
        " Take it back with `det project unarchive` (or `det workspace unarchive`), or name another."
    ),
    Hint.UNARCHIVE_WORKSPACE: " Take it back with `det workspace unarchive`, or name another.",
}
"""Hint -> text that is appended to the error message."""


def text_of(error: BaseException) -> str:
    """Return an error's message with its hint."""
    if isinstance(error, StoreError) and error.hint is not None:
        return f"{error}{WORDS[error.hint]}"
    return str(error)
