"""Answers as JSON whose texts cannot control the reader's terminal.

Clients print names, descriptions and messages as they come (``det experiment list``). What is the user's data (configs,
metrics, metadata) goes as ``orjson.Fragment`` and stays byte for byte what was stored; clients print it as JSON or YAML,
which escape by themselves.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import orjson

from dstrial.visible_text import visible

# As JSON has them: control characters escaped, the others as UTF-8. Finds too much (an escaped backslash before b, data),
# never too little; most answers have none and are written once.
_SUSPECT = re.compile(rb"\\(?:u00[01]|b|f|r)|\x7f|\xc2[\x80-\x9f]|\xe2\x80[\xa8-\xae]|\xe2\x81[\xa6-\xa9]")


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
