"""A checksum of JSON values, kept among them: for the small files that no other file has a checksum of."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

SEAL_KEY = "sha256"
"""Key of the checksum, at the top level."""


def sealed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same JSON values with their checksum."""
    return {**values, SEAL_KEY: _digest(values)}


def is_intact(values: Mapping[str, Any]) -> bool:
    """Say whether values that ``sealed`` returned are unchanged; True for values without a checksum."""
    return SEAL_KEY not in values or values[SEAL_KEY] == _digest(values)


def _digest(values: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in values.items() if key != SEAL_KEY}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
