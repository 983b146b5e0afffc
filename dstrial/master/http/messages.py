"""Answers: in the shapes of Determined's classes, in pages, safe for terminals.

Clients print names, descriptions and messages as they come (``det experiment list``). What is the user's data (configs,
metrics, metadata) goes as ``orjson.Fragment`` and stays byte for byte what was stored; clients print it as JSON or YAML,
which escape by themselves.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Mapping
from typing import Any

import orjson

from dstrial.errors import RequestError
from dstrial.visible_text import visible

DEFAULT_LIMIT = 100  # rows of a page unless the client says, as in Determined 0.38.1

# As JSON has them: control characters escaped, the others as UTF-8. Finds too much (an escaped backslash before b, data),
# never too little; most answers have none and are written once.
_SUSPECT = re.compile(rb"\\(?:u00[01]|b|f|r)|\x7f|\xc2[\x80-\x9f]|\xe2\x80[\xa8-\xae]|\xe2\x81[\xa6-\xa9]")


def message(bindings_class: type, **fields: Any) -> dict[str, Any]:
    """Return a message with every field of its class; those not given are null."""
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
    offset: int
    limit: int
    start: int
    end: int
    total: int

    def to_json(self) -> dict[str, int]:
        return {
            "offset": self.offset,
            "limit": self.limit,
            "startIndex": self.start,
            "endIndex": self.end,
            "total": self.total,
        }


def page_of(total: int, offset: int | None, limit: int | None) -> Page:
    """Return which of ``total`` rows to send.

    A negative offset counts from the end; limit 0 or None is 100, -1 all, -2 none (Determined 0.38.1
    ``master/internal/api/paginate.go``).
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


def to_json(answer: Any) -> bytes:
    """Return an answer as JSON; keys of mappings may be numbers."""
    body = orjson.dumps(answer, option=orjson.OPT_NON_STR_KEYS)
    return orjson.dumps(_shown(answer), option=orjson.OPT_NON_STR_KEYS) if _SUSPECT.search(body) else body


def _shown(value: Any) -> Any:
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, Mapping):
        return {key: _shown(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_shown(inner) for inner in value]
    return value
