"""Errors of the store, independent of HTTP and clients.

The HTTP layer maps each class to a status, and :mod:`dstrial.master.advice` maps each hint to text.
"""

from __future__ import annotations

import enum

from dstrial.errors import MasterError


class Hint(enum.Enum):
    """Suggested action for an error."""

    LIST_ALLOCATIONS = enum.auto()
    LIST_CHECKPOINTS = enum.auto()
    LIST_EXPERIMENTS = enum.auto()
    LIST_MODELS = enum.auto()
    LIST_OR_CREATE_PROJECTS = enum.auto()
    LIST_PROJECTS = enum.auto()
    LIST_TASKS = enum.auto()
    LIST_TEMPLATES = enum.auto()
    LIST_TOKENS = enum.auto()
    LIST_TRIALS = enum.auto()
    LIST_USERS = enum.auto()
    LIST_VERSIONS = enum.auto()
    LIST_WEBHOOKS = enum.auto()
    LIST_WORKSPACES = enum.auto()
    CONTINUE_EXPERIMENT = enum.auto()
    CREATE_PROJECT = enum.auto()
    CREATE_WORKSPACE = enum.auto()
    FORK_TASK = enum.auto()
    KILL_DETACHED = enum.auto()
    MOVE_MODELS = enum.auto()
    REVOKE_TOKENS = enum.auto()
    SET_TEMPLATE = enum.auto()
    TAKE_CHECKPOINT = enum.auto()
    UNARCHIVE_EXPERIMENT = enum.auto()
    UNARCHIVE_PROJECT = enum.auto()
    UNARCHIVE_WORKSPACE = enum.auto()


class StoreError(MasterError):
    """Base class: the request is not possible with the stored rows; see ``hint``."""

    def __init__(self, text: str, hint: Hint | None = None) -> None:
        super().__init__(text)
        self.hint = hint


class NotFoundError(StoreError):
    """The row does not exist."""


class ConflictError(StoreError):
    """Another row, or existing content of this row, conflicts with the request."""


class InvalidError(StoreError):
    """A value is invalid, or not allowed in the current state."""
