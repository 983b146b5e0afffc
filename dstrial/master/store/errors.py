"""Errors of the store; the HTTP layer maps each class to a status."""

from __future__ import annotations

from typing import TypeVar

from dstrial.errors import MasterError
from dstrial.master.hints import Hint

__all__ = ["ConflictError", "Hint", "InvalidError", "NotFoundError", "StoreError", "required"]

T = TypeVar("T")


class StoreError(MasterError):
    """Base class of errors: the stored rows do not allow the request."""

    def __init__(self, text: str, hint: Hint | None = None) -> None:
        super().__init__(text if hint is None else f"{text}{hint.value}")


class NotFoundError(StoreError):
    """The row does not exist."""


class ConflictError(StoreError):
    """Another row, or existing content of this row, conflicts with the request."""


class InvalidError(StoreError):
    """A value is invalid, or not allowed in the current state."""


def required(row: T | None, what: str, hint: Hint) -> T:
    """Return the row; raise ``NotFoundError`` if it is None."""
    if row is None:
        raise NotFoundError(f"{what} is not found", hint)
    return row
