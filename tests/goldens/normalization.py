"""Replace values that differ between two recordings of the same behaviour."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping

_UUID = re.compile(r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b")
_TIME = re.compile(r"\b20\d\d-\d\d-\d\d[T ]\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)?")
_LONG_NUMBER = re.compile(r"-?\b\d+\.\d{6,}(?:[eE][+-]?\d+)?")
_NUMBER = r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?"


def normalized(text: str, literals: Mapping[str, str] | None = None, measured: Collection[str] = ()) -> str:
    """Return a recording with placeholders for values that vary between recordings.

    UUIDs become ``<uuid 1>``, ``<uuid 2>`` in order of first appearance, so equal UUIDs stay recognisable.
    Timestamps become ``<time>``, with a dot for fractional seconds and ``Z`` or ``zone`` for a time zone.

    Args:
        text: the recording.
        literals: varying text (a path, a port, a token) -> placeholder name; longer texts are replaced first.
        measured: JSON keys with measured numbers; ``"seconds": 1.5`` becomes ``"seconds": "<measured>"``.
    """
    for literal, name in sorted((literals or {}).items(), key=lambda pair: -len(pair[0])):
        text = text.replace(literal, f"<{name}>")
    seen: dict[str, int] = {}
    text = _UUID.sub(lambda found: f"<uuid {seen.setdefault(found[0], len(seen) + 1)}>", text)
    text = _TIME.sub(_form_of_time, text)
    for key in measured:
        text = re.sub(rf'("{re.escape(key)}": ?){_NUMBER}(?=[\s,}}\]]|$)', r'\1"<measured>"', text)
    return text


def with_last_digits_of(golden: str, recorded: str) -> str:
    """Replace numbers by the golden's where they differ only in the last digits.

    Processors sum floats in different orders. Numbers with at least six decimals may differ by a relative 1e-9. If the
    recording has more or fewer such numbers than the golden, it is returned unchanged.
    """
    numbers = [found[0] for found in _LONG_NUMBER.finditer(golden)]
    if len(numbers) != len(_LONG_NUMBER.findall(recorded)):
        return recorded
    left = iter(numbers)

    def in_form_of_golden(found: re.Match[str]) -> str:
        one = next(left)
        return one if math.isclose(float(one), float(found[0]), rel_tol=1e-9) else found[0]

    return _LONG_NUMBER.sub(in_form_of_golden, recorded)


def _form_of_time(found: re.Match[str]) -> str:
    zone = {None: "", "Z": " Z"}.get(found[2], " zone")
    return f"<time{'.' if found[1] else ''}{zone}>"
