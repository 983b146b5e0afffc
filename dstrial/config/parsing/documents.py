"""The one way in for users' YAML and JSON: plain values with line numbers.

YAML is read by version 1.2's core rules, as Determined's client does: ``1e-5`` is a number and ``yes`` is a word. JSON is
strict, as ``overwrite_deepspeed_config`` has it. A key given twice is a problem in both. What is beyond
:mod:`dstrial.config.parsing.limits` is refused before it costs anything. Whatever the text is, nothing here raises another
error than ConfigError.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from dstrial.config.diagnostics import MAX_PROBLEMS, KeyPath
from dstrial.config.parsing import yaml_reader
from dstrial.config.parsing.limits import (
    DEFAULT_LIMITS,
    TextLimits,
    check_text,
    check_value,
    too_deep,
    too_large,
)
from dstrial.config.parsing.yaml_scalars import Dumper, ScalarError, integer, real, scalar
from dstrial.errors import ConfigError, ConfigProblem

_PLAIN_WORD = re.compile(r"(?!\.\.\.$)[A-Za-z0-9_.+][A-Za-z0-9_.+-]*")
"""A text that YAML reads as one plain scalar, recognised without a parser."""


@dataclasses.dataclass(frozen=True, slots=True)
class Document:
    """A parsed file."""

    label: str  # the file's name in messages
    value: Any  # dictionaries, lists and scalars
    lines: dict[KeyPath, str]  # `label:line` of every key and list item; the empty path is the file


def parse_yaml_value(text: str, label: str = "the value") -> Any:
    """Read a value as a config does: ``4`` an int, ``1e-5`` a float, ``[1]`` a list.

    Raises:
        ConfigError: it is not YAML, gives a key twice, or is beyond the limits of a config; ``label`` names it.
    """
    if _PLAIN_WORD.fullmatch(text):
        try:
            return scalar(text, None, is_plain=True)
        except ScalarError as error:
            raise ConfigError([ConfigProblem(label, error.got, error.expected, error.fix)]) from error
    return read_yaml_text(text, label).value


def yaml_text(value: Any) -> str:
    """Write plain values as YAML that 1.2 and 1.1 both read as the same values.

    PyYAML alone would write the word ``"2e-3"`` without quotes, which version 1.2 reads as a number.
    """
    text: str = yaml.dump(value, Dumper=Dumper, sort_keys=False, allow_unicode=True)  # a SafeDumper
    return text


def read_yaml(path: Path, label: str, limits: TextLimits = DEFAULT_LIMITS) -> Document:
    """Read a YAML file without repeated keys, within the limits."""
    return read_yaml_text(_read_text(path, label, limits), label, limits)


def read_yaml_text(text: str, label: str, limits: TextLimits = DEFAULT_LIMITS) -> Document:
    check_text(text, label, limits)
    return Document(label, *yaml_reader.read(text, label, limits))


def read_json(path: Path, label: str, limits: TextLimits = DEFAULT_LIMITS) -> Document:
    """Read a JSON file: no comments, trailing commas, NaN or repeated keys."""
    return read_json_text(_read_text(path, label, limits), label, limits)


def read_json_text(text: str, label: str, limits: TextLimits = DEFAULT_LIMITS) -> Document:
    check_text(text, label, limits)
    try:
        # The parser recurses in C and raises RecursionError long before the stack ends; what it survives is counted.
        value = json.loads(text, parse_constant=_reject_constant, parse_int=integer, parse_float=_finite)
    except json.JSONDecodeError as error:
        problem = ConfigProblem(
            f"{label}:{error.lineno}: the text from column {error.colno}",
            f"not JSON ({error.msg})",
            "strict JSON, without comments and without a comma after the last element",
            "Correct this line.",
        )
        raise ConfigError([problem]) from error
    except ScalarError as error:
        raise ConfigError(
            [ConfigProblem(f"{label}: a value", error.got, error.expected, error.fix)]
        ) from error
    except RecursionError as error:
        raise ConfigError([too_deep(label)]) from error
    check_value(value, label, limits)
    lines: dict[KeyPath, str] = {(): f"{label}:1"}
    problems: list[ConfigProblem] = []
    for key_path, line, first in _json_positions(text):
        lines[key_path] = f"{label}:{line}"
        if first is not None:
            problems.append(yaml_reader.given_twice(f"{label}:{line}", key_path, first))
            if len(problems) >= MAX_PROBLEMS:
                break
    if problems:
        raise ConfigError(problems)
    return Document(label, value, lines)


def _json_positions(text: str) -> Iterator[tuple[KeyPath, int, int | None]]:
    """Yield each key's path and line in valid JSON, and a repeated key's first line."""
    stack: list[tuple[KeyPath, dict[str, int] | None]] = []
    path: KeyPath = ()
    index = 0
    indices: list[int] = []
    expects_key = False
    line = 1
    end = 0
    for match in re.finditer(r'"[^"\\]*(?:\\.[^"\\]*)*"|[{}\[\],:]|[^\s{}\[\],:"]+', text):
        line += text.count("\n", end, match.start())
        end = match.start()
        lexeme = match.group()
        if lexeme in "}]":
            path, _ = stack.pop()
            index = indices.pop()
            expects_key = False
            continue
        if lexeme == ",":
            path = stack[-1][0]
            expects_key = stack[-1][1] is not None
            index += 1
            continue
        if lexeme == ":":
            continue
        if expects_key:
            keys = stack[-1][1]
            key = json.loads(lexeme)
            path = (*stack[-1][0], key)
            if keys is not None:
                yield path, line, keys.get(key)
                keys.setdefault(key, line)
            expects_key = False
            continue
        if stack and stack[-1][1] is None:
            path = (*stack[-1][0], index)
            yield path, line, None
        if lexeme in "{[":
            stack.append((path, {} if lexeme == "{" else None))
            indices.append(index)
            index = 0
            expects_key = lexeme == "{"


def _finite(text: str) -> float:
    value = real(text)
    if not math.isfinite(value):
        _reject_constant(text)
    return value


def _reject_constant(text: str) -> Any:
    raise ScalarError(text, "a finite number", "Write a number.")


def _read_text(path: Path, label: str, limits: TextLimits) -> str:
    try:
        with path.open("rb") as file:
            # Not the file's size, which says nothing of devices and pipes.
            content = file.read(limits.text_bytes + 1)
        if len(content) > limits.text_bytes:
            raise ConfigError([too_large(label, f"more than {limits.text_bytes} bytes", limits)])
        return content.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except (OSError, UnicodeDecodeError) as error:
        got, fix = "not UTF-8 text", "Correct the file."
        if isinstance(error, FileNotFoundError):
            got, fix = "missing", "Correct the path."
        elif isinstance(error, OSError):
            got, fix = f"unreadable ({error.strerror})", "Correct the path or the file's permissions."
        raise ConfigError([ConfigProblem(f"{label}: the file", got, "a text file", fix)]) from error
