"""Scalars of YAML 1.2's core schema: numbers, flags, null, and legal tags.

``1e-5`` is a number and ``yes`` is a word, as Determined's client has it. Nothing else is made of a text: no dates, no
sets, no Python objects.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import yaml

MERGE_KEY = "<<"

_PREFIX = "tag:yaml.org,2002:"
_MAX_DIGITS = 1000
"""More than any number has; Python itself refuses integers of more than 4300 digits, with an error of its own."""

_RULES: tuple[tuple[str, str, str], ...] = (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9][0-9_]*|0x[0-9a-fA-F_]+|0o[0-7_]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+0123456789.",
    ),
    ("null", r"~|null|Null|NULL|", "~nN\0"),
)
"""Tag, what a plain scalar of it looks like, and with which characters it begins (NUL: it may be empty)."""

_OTHER_BREAKS = re.compile("[\x85\u2028\u2029]")
_PATTERNS = {kind: re.compile(pattern) for kind, pattern, _ in _RULES}
_BY_FIRST: dict[str, list[str]] = {}
for _kind, _, _first in _RULES:
    for _character in _first:
        _BY_FIRST.setdefault(_character.replace("\0", ""), []).append(_kind)


class Dumper(yaml.SafeDumper):
    """Quotes what YAML 1.1 or 1.2 would read as another type."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        """Write line breaks that YAML 1.2 has not as escapes; other quotes fold them."""
        style = '"' if _OTHER_BREAKS.search(text) else None
        return self.represent_scalar(_PREFIX + "str", text, style=style)


Dumper.add_representer(str, Dumper.represent_text)

for _kind, _pattern, _first in (*_RULES, ("merge", MERGE_KEY, "<")):
    Dumper.add_implicit_resolver(
        _PREFIX + _kind, re.compile(f"^(?:{_pattern})$"), [c if c != "\0" else "" for c in _first]
    )


class ScalarError(ValueError):
    """A scalar has a wrong value; the arguments are parts of a message."""

    def __init__(self, got: str, expected: str, fix: str) -> None:
        super().__init__(got)
        self.got, self.expected, self.fix = got, expected, fix


def scalar(text: str, tag: str | None, *, is_plain: bool) -> Any:
    """Return a scalar's value; ``tag`` is as written, None or ``!`` for none."""
    if tag is None or tag == "!":
        if not is_plain or tag == "!":
            return _string(text)
        for kind in _BY_FIRST.get(text[:1], ()):
            if _PATTERNS[kind].fullmatch(text):
                return _READERS[kind](text)
        return _string(text)
    kind = tag.removeprefix(_PREFIX)
    if tag == kind or kind not in _READERS:
        raise unknown_tag(tag, "a scalar")
    pattern = _PATTERNS.get(kind)
    if pattern is not None and not pattern.fullmatch(text):
        raise ScalarError(f"{_shortened(text)} tagged {kind}, not a {kind}", f"a {kind}", "Remove the tag.")
    return _READERS[kind](text)


def unknown_tag(tag: str, what: str) -> ScalarError:
    return ScalarError(
        f"{what} with the tag {_shortened(tag)}",
        "no tag, or one of null, bool, int, float, str, seq and map where it fits",
        "Remove the tag.",
    )


def is_group_tag(tag: str | None, kind: str) -> bool:
    """Say whether a list (``seq``) or mapping (``map``) may have a tag."""
    return tag in (None, "!", _PREFIX + kind)


def _int(text: str) -> int:
    digits = text.replace("_", "").lstrip("+-")
    _require_short(digits)
    try:
        value = int(digits, 0) if digits[:2] in ("0x", "0o") else int(digits)
    except ValueError as error:
        raise ScalarError(
            f"{_shortened(text)}, not an integer", "an integer", "Put it into quotes."
        ) from error
    return -value if text[0] == "-" else value


def _float(text: str) -> float:
    plain = text.replace("_", "").lower()
    _require_short(plain)
    return float(plain.replace(".inf", "inf").replace(".nan", "nan"))


def _require_short(digits: str) -> None:
    if len(digits) > _MAX_DIGITS:
        raise ScalarError(
            f"a number of {len(digits)} digits",
            f"at most {_MAX_DIGITS} digits",
            "Write a shorter number, or put it into quotes.",
        )


def _string(text: str) -> str:
    """Return a string that files, environment variables and UTF-8 can hold."""
    if "\0" in text:
        raise ScalarError("a text with a NUL character", "text without NUL", "Remove the character.")
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ScalarError(
                "a text with half a surrogate pair", "Unicode characters", "Write the whole character."
            ) from error
    return text


def _shortened(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:60] + "…")


_READERS: dict[str, Callable[[str], Any]] = {
    "null": lambda _text: None,
    "bool": lambda text: text.lower() == "true",
    "int": _int,
    "float": _float,
    "str": _string,
}

string, integer, real = _string, _int, _float
"""The same checks for what is read as JSON."""
