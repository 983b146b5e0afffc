"""How large a config may be: bytes of text, values with aliases expanded, depth.

A YAML of 700 bytes expands to 19 GiB where nobody counts (nine levels of nine aliases), and 20,000 brackets exhaust the
stack of whatever walks them recursively. Both are refused here, before anything walks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from dstrial.config.parsing.yaml_scalars import ScalarError, string
from dstrial.errors import ConfigError, ConfigProblem

MAX_DEPTH = 100
"""Deepest nesting of lists and mappings in anything that users send; the code that walks configs recurses this far."""

MAX_KEY_CHARS = 1024
"""Longest key; YAML has the same limit for all that is not written behind ``?``."""


@dataclasses.dataclass(frozen=True, slots=True)
class TextLimits:
    """The bounds of one config."""

    text_bytes: int = 2**20  # of UTF-8
    num_values: int = 100_000  # scalars, keys, lists and mappings, with every alias written out
    raised_by: str = ""  # how to get more, a sentence; empty if impossible


DEFAULT_LIMITS = TextLimits()
"""What the command line uses, and a master whose settings say nothing else."""


def check_text(text: str, label: str, limits: TextLimits = DEFAULT_LIMITS) -> None:
    num_bytes = _num_bytes(text)
    if num_bytes > limits.text_bytes:
        raise ConfigError([too_large(label, f"{num_bytes} bytes", limits)])


def check_value(value: Any, label: str, limits: TextLimits = DEFAULT_LIMITS) -> None:
    """Refuse plain values beyond the limits, which were read without them.

    None of the dictionaries, lists and scalars in ``value`` holds itself.

    Raises:
        ConfigError: there are more than ``num_values``, or they are nested deeper than ``MAX_DEPTH``, or the strings among
            them are together longer than ``text_bytes``, or one of them has a character that no text can have.
    """
    level: list[Any] = [value]
    num_values = num_bytes = depth = 0
    while level:
        num_values += len(level)
        if num_values > limits.num_values:
            raise ConfigError([too_many(label, limits)])
        num_bytes += sum(_num_bytes(one) for one in level if isinstance(one, str))
        if num_bytes > limits.text_bytes:
            raise ConfigError([too_large(label, f"at least {num_bytes} bytes", limits)])
        _check_strings(level, label)
        groups = [one for one in level if isinstance(one, (Mapping, list, tuple))]
        depth += 1
        if groups and depth > MAX_DEPTH:
            raise ConfigError([too_deep(label)])
        level = []
        for group in groups:
            if isinstance(group, Mapping):
                long = next((key for key in group if len(str(key)) > MAX_KEY_CHARS), None)
                if long is not None:
                    got, expected = f"{len(str(long))} characters long", f"at most {MAX_KEY_CHARS} characters"
                    raise ConfigError(
                        [ConfigProblem(f"{label}: a key", got, expected, "Write a shorter one.")]
                    )
                level += group.keys()
                level += group.values()
            else:
                level += group


def _num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def _check_strings(values: Iterable[Any], label: str) -> None:
    for one in values:
        if isinstance(one, str):
            try:
                string(one)
            except ScalarError as error:
                raise ConfigError(
                    [ConfigProblem(f"{label}: a value", error.got, error.expected, error.fix)]
                ) from error


def too_large(where: str, got: str, limits: TextLimits) -> ConfigProblem:
    return ConfigProblem(
        f"{where}: the text",
        got,
        f"at most {limits.text_bytes} bytes",
        limits.raised_by or "Move what is large into files of the model definition.",
    )


def too_many(where: str, limits: TextLimits) -> ConfigProblem:
    return ConfigProblem(
        f"{where}: the text",
        f"more than {limits.num_values} values once its aliases are written out",
        f"at most {limits.num_values} scalars, keys, lists and mappings",
        limits.raised_by
        or "Remove aliases of aliases, or move long lists into files of the model definition.",
    )


def too_deep(where: str) -> ConfigProblem:
    return ConfigProblem(
        f"{where}: the text",
        f"nested deeper than {MAX_DEPTH} levels",
        f"at most {MAX_DEPTH} levels of lists and mappings",
        "Send a flatter one.",
    )
