"""Errors of the store; the HTTP layer maps each class to a status."""

from __future__ import annotations

from typing import TypeVar

from dstrial.errors import MasterError
from dstrial.master.hints import Hint

__all__ = ["ConflictError", "Hint", "InvalidError", "NotFoundError", "StoreError", "required"]

T = TypeVar("T")


class StoreError(MasterError):
    """Base class of errors for requests that conflict with the database."""

    def __init__(self, text: str, hint: Hint | None = None) -> None:
        super().__init__(text if hint is None else f"{text}{hint.value}")


class NotFoundError(StoreError):
    """The row that a request names does not exist."""


class ConflictError(StoreError):
    """A request conflicts with stored content, for example because a name is taken."""


class InvalidError(StoreError):
    """A value in a request is invalid, or not allowed in the row's current state."""


def required(row: T | None, what: str, hint: Hint) -> T:
    """Return ``row``; if it is None, raise ``NotFoundError`` about ``what``.

    ``hint`` is appended to the message, and says how to find an existing row.
    """
    if row is None:
        raise NotFoundError(f"{what} is not found", hint)
    return row
