"""Collect errors, warnings and notes about a config, each with its place."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from dstrial.errors import ConfigError, ConfigProblem

_T = TypeVar("_T")

KeyPath: TypeAlias = tuple[str | int, ...]
"""Keys and list positions from the top of a document down to one value."""

Lines: TypeAlias = Mapping[KeyPath, str]
"""Where each key stands, as ``file:line`` or another short label such as ``--config``."""

OVERRIDE_LABEL = "--config"
"""Label of what the command line gave; ``--config: key`` where that key is the top of what is checked."""

MAX_PROBLEMS = 100
"""After so many problems a check stops, so that a hostile config costs little and an answer stays short."""

_MAX_RENDERED_CHARS = 80
_ENCODER = json.JSONEncoder(ensure_ascii=False)


def dotted(path: KeyPath) -> str:
    """Return a key path as a person writes it: ``searcher.metric``, ``labels[0]``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def nested_form(parts: Sequence[str], value: Any) -> str:
    """Return how a value below several keys is written, ``a: {b: 3}`` for example."""
    *outer, last = parts
    text = f"{last}: {render(value)}"
    for part in reversed(outer):
        text = f"{part}: {{{text}}}"
    return text


def key_path(text: str) -> KeyPath:
    """Return a dotted key's path (no list positions); the empty text is the top."""
    return tuple(text.split(".")) if text else ()


def render(value: Any) -> str:
    """Return a value as JSON, shortened to about 80 characters."""
    text = ""
    try:
        # Piece by piece: a whole config is large, and many problems may be about the same part of it.
        for piece in _ENCODER.iterencode(value):
            text += piece
            if len(text) > _MAX_RENDERED_CHARS:
                break
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= _MAX_RENDERED_CHARS else text[: _MAX_RENDERED_CHARS - 1] + "…"


def locate(lines: Lines, path: KeyPath, default: str) -> str:
    """Return where a key stands: its own label, or the nearest one above it.

    The key need not exist; ``default`` is the label when nothing above it has one either.
    """
    for length in range(len(path), -1, -1):
        label = lines.get(path[:length])
        if label is not None:
            return label
    return default


class Diagnostics:
    """Problems and warnings about one document; ``where`` labels keys without a line."""

    def __init__(self, lines: Lines, where: str) -> None:
        self._lines = lines
        self._where = where
        self.problems: list[ConfigProblem] = []
        self.warnings: list[str] = []
        self.notes: list[str] = []
        self._known: tuple[set[ConfigProblem], set[str], set[str]] = (set(), set(), set())

    def place(self, path: KeyPath | str) -> str:
        """Return ``file:line: key`` for a key path or a dotted key."""
        parts = key_path(path) if isinstance(path, str) else path
        label = locate(self._lines, parts, self._where)
        if not parts:
            return label
        separator = "." if label.startswith(f"{OVERRIDE_LABEL}: ") else ": "
        return f"{label}{separator}{dotted(parts)}"

    def problem(self, path: KeyPath | str, got: str, expected: str, fix: str) -> None:
        """Record an error; raise ConfigError with all if this is number ``MAX_PROBLEMS``."""
        _add_new(self.problems, self._known[0], ConfigProblem(self.place(path), got, expected, fix))
        if len(self.problems) >= MAX_PROBLEMS:
            more = ConfigProblem(
                self._where,
                f"wrong in at least {MAX_PROBLEMS} places",
                "none that is wrong",
                "Correct those above, and check again.",
            )
            raise ConfigError([*self.problems, more])

    def warn(self, path: KeyPath | str, text: str) -> None:
        """Record a warning; ``text`` follows ``file:line: key``."""
        _add_new(self.warnings, self._known[1], f"{self.place(path)} {text}")

    def note(self, path: KeyPath | str, text: str) -> None:
        """Record what is worth knowing; ``text`` follows ``file:line: key``."""
        _add_new(self.notes, self._known[2], f"{self.place(path)} {text}")

    def raise_if_any(self) -> None:
        if self.problems:
            raise ConfigError(self.problems)


def _add_new(found: list[_T], known: set[_T], one: _T) -> None:
    """Append an item unless it is there; ``known`` has the items of the last call."""
    # Others append too.
    if len(known) != len(found):
        known.update(found)
    if one not in known:
        found.append(one)
        known.add(one)
