"""Collect errors, warnings and notes about a config, each with file and line."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from dstrial.errors import ConfigError, ConfigProblem

KeyPath: TypeAlias = tuple[str | int, ...]
"""Keys and list indexes that lead from the root of a document to one value."""

Lines: TypeAlias = Mapping[KeyPath, str]
"""Path of each key -> its position: ``file:line`` or another short label such as ``--config``."""

OVERRIDE_LABEL = "--config"
"""Label of values from the command line; ``--config: key`` if only the section ``key`` is checked."""

MAX_PROBLEMS = 100
"""Number of problems at which a check stops, so that a hostile config costs little and the response stays short."""

_MAX_RENDERED_CHARS = 80
_ENCODER = json.JSONEncoder(ensure_ascii=False)


def dotted(path: KeyPath) -> str:
    """Return a key path as text: ``searcher.metric``, ``labels[0]``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def nested_form(parts: Sequence[str], value: Any) -> str:
    """Return YAML of ``value`` below the keys ``parts``, for example ``a: {b: 3}``."""
    *outer, last = parts
    text = f"{last}: {render(value)}"
    for part in reversed(outer):
        text = f"{part}: {{{text}}}"
    return text


def key_path(text: str) -> KeyPath:
    """Split a dotted key (without list indexes) into a path; "" is the root."""
    return tuple(text.split(".")) if text else ()


def render(value: Any) -> str:
    """Return a value as JSON, shortened to about 80 characters."""
    text = ""
    try:
        # Encoding stops early, because a config may be large and many problems may render the same part.
        for piece in _ENCODER.iterencode(value):
            text += piece
            if len(text) > _MAX_RENDERED_CHARS:
                break
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= _MAX_RENDERED_CHARS else text[: _MAX_RENDERED_CHARS - 1] + "…"


def locate(lines: Lines, path: KeyPath, default: str) -> str:
    """Return the ``file:line`` of a key, or of its nearest parent with a line.

    The key need not exist; ``default`` is returned if no parent has a line either.
    """
    for length in range(len(path), -1, -1):
        label = lines.get(path[:length])
        if label is not None:
            return label
    return default


class Diagnostics:
    """Collects problems, warnings and notes about one document.

    ``lines`` has the ``file:line`` of each key; ``where`` labels keys without a line.
    """

    def __init__(self, lines: Lines, where: str) -> None:
        self._lines = lines
        self._where = where
        self.problems: list[ConfigProblem] = []
        self.warnings: list[str] = []
        self.notes: list[str] = []

    def place(self, path: KeyPath | str) -> str:
        """Return ``file:line: key`` for a key path or a dotted key."""
        parts = key_path(path) if isinstance(path, str) else path
        label = locate(self._lines, parts, self._where)
        if not parts:
            return label
        separator = "." if label.startswith(f"{OVERRIDE_LABEL}: ") else ": "
        return f"{label}{separator}{dotted(parts)}"

    def problem(self, path: KeyPath | str, got: str, expected: str, fix: str) -> None:
        """Record an error; the ``MAX_PROBLEMS``-th raises ConfigError with all errors."""
        self.problems.append(ConfigProblem(self.place(path), got, expected, fix))
        if len(self.problems) >= MAX_PROBLEMS:
            more = ConfigProblem(
                self._where,
                f"wrong in at least {MAX_PROBLEMS} places",
                "none that is wrong",
                "Correct those above, and check again.",
            )
            raise ConfigError([*self.problems, more])

    def warn(self, path: KeyPath | str, text: str) -> None:
        """Record a warning; the message is ``file:line: key`` and then ``text``."""
        self.warnings.append(f"{self.place(path)} {text}")

    def note(self, path: KeyPath | str, text: str) -> None:
        """Record a note; the message is ``file:line: key`` and then ``text``."""
        self.notes.append(f"{self.place(path)} {text}")

    def raise_if_any(self) -> None:
        if self.problems:
            raise ConfigError([*dict.fromkeys(self.problems)])
