"""Answers in the shapes of Determined's generated classes, and pages of lists."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any

from dstrial.errors import RequestError

DEFAULT_LIMIT = 100
"""Rows of a page whose size the client leaves open (Determined 0.38.1 answers 100 as well)."""


def message(bindings_class: type, **fields: Any) -> dict[str, Any]:
    """Return a message with every field of its class; those not given are null.

    Args:
        bindings_class: a class of ``determined.common.api.bindings``.
        fields: JSON values by the class's own field names.

    Raises:
        TypeError: a field does not exist, or one that the client requires is missing.
    """
    required, optional = _names_of(bindings_class)
    unknown = fields.keys() - required - optional.keys()
    missing = required - fields.keys()
    if unknown or missing:
        raise TypeError(
            f"{bindings_class.__name__} is given {sorted(unknown)} and lacks {sorted(missing)}; expected its own fields. "
            "Name them as the generated class does."
        )
    return {**optional, **fields}


@functools.cache
def _names_of(bindings_class: type) -> tuple[frozenset[str], dict[str, None]]:
    parameters = list(inspect.signature(bindings_class).parameters.values())
    empty = inspect.Parameter.empty
    required = frozenset(parameter.name for parameter in parameters if parameter.default is empty)
    return required, {parameter.name: None for parameter in parameters if parameter.default is not empty}


@dataclasses.dataclass(frozen=True, slots=True)
class Page:
    """The part of a list that a client asked for.

    Attributes:
        offset: as asked.
        limit: as asked.
        start: index of the first row.
        end: index after the last row.
        total: rows of the whole list.
    """

    offset: int
    limit: int
    start: int
    end: int
    total: int

    def to_json(self) -> dict[str, int]:
        """Return the protocol's ``pagination`` object."""
        return {
            "offset": self.offset,
            "limit": self.limit,
            "startIndex": self.start,
            "endIndex": self.end,
            "total": self.total,
        }


def page_of(total: int, offset: int | None, limit: int | None) -> Page:
    """Return which rows of a list to send.

    Args:
        total: rows of the whole list.
        offset: of the first row; negative counts from the end.
        limit: number of rows; 0 or None for 100, -1 for all, -2 for none.

    Raises:
        RequestError: the limit is below -2.

    Source: Determined 0.38.1 ``master/internal/api/paginate.go`` (rules for 0, -1, -2 and negative offsets).
    """
    offset = offset or 0
    limit = limit or DEFAULT_LIMIT
    if limit < -2:
        raise RequestError(
            400, f"limit is {limit}; expected at least -2. Send -1 for all rows, or a positive number."
        )
    start = max(0, total + offset) if offset < 0 else min(offset, total)
    end = total if limit == -1 else start if limit == -2 else min(start + limit, total)
    return Page(offset, limit, start, end, total)
