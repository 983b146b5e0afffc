"""Read YAML and JSON files into plain values that know on which line each key stands.

YAML is read by version 1.2's core rules, as Determined's client does: ``1e-5`` is a number and
``yes`` is a word. JSON is strict, as ``overwrite_deepspeed_config`` has it. A key given twice is a
problem in both.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from dstrial.config.findings import KeyPath, dotted
from dstrial.errors import ConfigError, ConfigProblem


@dataclasses.dataclass(frozen=True, slots=True)
class Document:
    """A parsed file.

    Attributes:
        label: the file's name as it appears in messages.
        value: dictionaries, lists and scalars.
        lines: ``label:line`` of every key and list item; the empty path is the file itself.
    """

    label: str
    value: Any
    lines: dict[KeyPath, str]


class _CoreLoader(yaml.SafeLoader):
    """PyYAML's safe loader with the scalars of YAML 1.2's core schema."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML's own protocol


class _Dumper(yaml.SafeDumper):
    """PyYAML's safe dumper, which quotes what either version of YAML would read as another type."""


def _construct_int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node)).replace("_", "")
    return int(text, 0) if re.match(r"[-+]?0[xob]", text) else int(text)


def _construct_float(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> float:
    text = str(loader.construct_scalar(node)).replace("_", "").lower()
    return float(text.replace(".inf", "inf").replace(".nan", "nan"))


for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9][0-9_]*|0x[0-9a-fA-F_]+|0o[0-7_]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+0123456789.",
    ),
    ("null", r"~|null|Null|NULL|", "~nN\0"),
    ("merge", r"<<", "<"),
):
    for _class in (_CoreLoader, _Dumper):
        _class.add_implicit_resolver(
            f"tag:yaml.org,2002:{_tag}",
            re.compile(f"^(?:{_pattern})$"),
            [c if c != "\0" else "" for c in _first],
        )
_CoreLoader.add_constructor("tag:yaml.org,2002:int", _construct_int)
_CoreLoader.add_constructor("tag:yaml.org,2002:float", _construct_float)


def parse_yaml_value(text: str) -> Any:
    """Read one value as the experiment config would: ``4`` an int, ``1e-5`` a float, ``[1, 2]`` a list.

    Raises:
        yaml.YAMLError: the text is not YAML.
    """
    return yaml.load(text, Loader=_CoreLoader)  # noqa: S506 - a subclass of SafeLoader


def yaml_text(value: Any) -> str:
    """Write plain values as YAML that reads back as the same values, by the rules of version 1.2 and of 1.1.

    PyYAML alone would write the word ``"2e-3"`` without quotes, which version 1.2 reads as a number.
    """
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)  # a SafeDumper
    return text


def read_yaml(path: Path, label: str) -> Document:
    """Read a YAML file.

    Args:
        path: the file.
        label: how to call it in messages.

    Raises:
        ConfigError: it cannot be read, is not YAML, or gives a key twice.
    """
    return read_yaml_text(_read_text(path, label), label)


def read_yaml_text(text: str, label: str) -> Document:
    """Read YAML from a text.

    Args:
        text: the text.
        label: how to call it in messages.

    Raises:
        ConfigError: it is not YAML, or gives a key twice.
    """
    problems: list[ConfigProblem] = []
    loader: _CoreLoader | None = None
    try:
        loader = _CoreLoader(text)
        node = loader.get_single_node()
        if node is not None:
            # Constructing the value merges "<<" into its mapping, after which an overridden key looks repeated.
            _walk_yaml(node, (), label, {}, problems, ())
        value = None if node is None else loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        reason = " ".join(part for part in (error.context, error.problem) if part)
        problem = ConfigProblem(
            f"{label}:{line}: the text", f"not YAML ({reason})", "valid YAML", "Correct this line."
        )
        raise ConfigError([problem]) from error
    except yaml.YAMLError as error:
        problem = ConfigProblem(
            f"{label}: the text", f"not YAML ({error})", "valid YAML", "Correct the file."
        )
        raise ConfigError([problem]) from error
    finally:
        if loader is not None:
            loader.dispose()
    if problems:
        raise ConfigError(problems)
    lines: dict[KeyPath, str] = {(): f"{label}:1"}
    if node is not None:
        _walk_yaml(node, (), label, lines, [], ())
    return Document(label, value, lines)


def _walk_yaml(
    node: yaml.Node,
    path: KeyPath,
    label: str,
    lines: dict[KeyPath, str],
    problems: list[ConfigProblem],
    above: tuple[int, ...],
) -> None:
    if id(node) in above:
        return
    above = (*above, id(node))
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            lines[(*path, index)] = f"{label}:{item.start_mark.line + 1}"
            _walk_yaml(item, (*path, index), label, lines, problems, above)
    elif isinstance(node, yaml.MappingNode):
        first_line: dict[str, int] = {}
        for key_node, value_node in node.value:
            key = str(key_node.value)
            line = key_node.start_mark.line + 1
            if key in first_line and first_line[key] != line:
                problems.append(_duplicate(f"{label}:{line}", (*path, key), first_line[key]))
            first_line.setdefault(key, line)
            lines[(*path, key)] = f"{label}:{line}"
            _walk_yaml(value_node, (*path, key), label, lines, problems, above)


def read_json(path: Path, label: str) -> Document:
    """Read a JSON file, strictly: no comments, no trailing commas, no NaN.

    Args:
        path: the file.
        label: how to call it in messages.

    Raises:
        ConfigError: it cannot be read, is not JSON, or gives a key twice.
    """
    text = _read_text(path, label)
    try:
        value = json.loads(text, parse_constant=_reject_constant)
    except json.JSONDecodeError as error:
        problem = ConfigProblem(
            f"{label}:{error.lineno}: the text from column {error.colno}",
            f"not JSON ({error.msg})",
            "strict JSON, without comments and without a comma after the last element",
            "Correct this line.",
        )
        raise ConfigError([problem]) from error
    except ValueError as error:
        problem = ConfigProblem(f"{label}: a value", str(error), "a finite number", "Write a number.")
        raise ConfigError([problem]) from error
    lines: dict[KeyPath, str] = {(): f"{label}:1"}
    problems: list[ConfigProblem] = []
    for key_path, line, first in _json_positions(text):
        lines[key_path] = f"{label}:{line}"
        if first is not None:
            problems.append(_duplicate(f"{label}:{line}", key_path, first))
    if problems:
        raise ConfigError(problems)
    return Document(label, value, lines)


def _json_positions(text: str) -> Iterator[tuple[KeyPath, int, int | None]]:
    """Yield path and line of every key and item of valid JSON, and the first line of a repeated key."""
    stack: list[tuple[KeyPath, dict[str, int] | None]] = []
    path: KeyPath = ()
    index = 0
    indices: list[int] = []
    expects_key = False
    line = 1
    end = 0
    for match in re.finditer(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+', text):
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


def _duplicate(place: str, path: KeyPath, first_line: int) -> ConfigProblem:
    return ConfigProblem(
        f"{place}: {dotted(path)}",
        f"given twice (first on line {first_line})",
        "every key once",
        "Remove one of the two.",
    )


def _reject_constant(name: str) -> Any:
    raise ValueError(name)


def _read_text(path: Path, label: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        problem = ConfigProblem(
            f"{label}: the file",
            f"unreadable ({reason})",
            "a readable text file",
            "Correct the path or the file.",
        )
        raise ConfigError([problem]) from error
