"""Response bodies: Determined's message classes, pagination, terminal safety.

Clients print names, descriptions and messages verbatim (``det experiment list``), so control characters are made visible here.
User data (configs, metrics, metadata) is sent as ``orjson.Fragment``, byte for byte as stored; clients print it as JSON or YAML,
which escape control characters.
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

DEFAULT_LIMIT = 100  # default page size, as in Determined 0.38.1

# Pattern of control characters in JSON. It has false positives (an escaped backslash before b, user data) but no false
# negatives; most responses do not match and are serialised only once.
_SUSPECT = re.compile(rb"\\(?:u00[01]|b|f|r)|\x7f|\xc2[\x80-\x9f]|\xe2\x80[\xa8-\xae]|\xe2\x81[\xa6-\xa9]")


def message(bindings_class: type, **fields: Any) -> dict[str, Any]:
    """Return a message with all fields of its class; fields not given are null."""
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
    """Return the range of rows for a page of ``total`` rows.

    A negative offset counts from the end. Limit 0 or None means 100, -1 all, -2 none (Determined 0.38.1
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
    """Serialise a response; mapping keys may be numbers."""
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
