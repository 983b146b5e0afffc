"""Parse untrusted YAML and JSON into plain values with line numbers.

YAML follows the core schema of version 1.2, as in Determined's client: ``1e-5`` is a number and ``yes`` is a string. JSON is
strict: comments, trailing commas and NaN are errors. A duplicate key is an error in both formats. For any text, the only error
raised is ConfigError.

Size, number of values and depth are limited, because nested aliases can expand 700 bytes to 19 GiB, and 20,000 brackets overflow
a recursive reader's stack.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import yaml

from dstrial.config.diagnostics import MAX_PROBLEMS, KeyPath, dotted
from dstrial.errors import ConfigError, ConfigProblem

MAX_DEPTH = 100
"""Maximum nesting of lists and mappings in user input; also the recursion depth of code that traverses configs."""

MAX_TEXT_BYTES = 2**20
"""Maximum size of a text, in bytes of UTF-8."""

MAX_VALUES = 100_000
"""Maximum number of scalars, keys, lists and mappings of a text, after alias expansion."""

_MAX_TAG_DIRECTIVES = 100  # libyaml takes quadratic time for them


@dataclasses.dataclass(frozen=True, slots=True)
class Document:
    """A parsed file with the line of each key."""

    label: str  # the file's name in messages
    value: Any  # dictionaries, lists and scalars
    lines: dict[KeyPath, str]  # `label:line` of every key and list item; the empty path is the file


class _InvalidError(ValueError):
    """An illegal value; ``args`` are the parts (got, expected, fix) of the message."""

    def at(self, where: str) -> ConfigError:
        return ConfigError([ConfigProblem(f"{where}: the text", *self.args)])


def _too_deep() -> _InvalidError:
    expected = f"at most {MAX_DEPTH} levels of lists and mappings"
    return _InvalidError(f"nested deeper than {MAX_DEPTH} levels", expected, "Send a flatter one.")


def _too_many() -> _InvalidError:
    return _InvalidError(
        f"more than {MAX_VALUES} values once its aliases are written out",
        f"at most {MAX_VALUES} scalars, keys, lists and mappings",
        "Remove aliases of aliases, or move long lists into files of the model definition.",
    )


def _too_large() -> _InvalidError:
    fix = "Move what is large into files of the model definition."
    return _InvalidError("too large", f"at most {MAX_TEXT_BYTES} bytes", fix)


def _num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def check_value(value: Any, label: str) -> None:
    """Raise ConfigError if an already parsed value exceeds the limits.

    ``value`` must have no reference cycles.

    Raises:
        ConfigError: there are more than ``MAX_VALUES`` values, they are nested deeper than ``MAX_DEPTH``, all strings
        together are longer than ``MAX_TEXT_BYTES``, or a string has an illegal character.
    """
    waiting: list[tuple[Any, int]] = [(value, 0)]
    num_values, num_bytes = 1, 0
    try:
        while waiting:
            one, depth = waiting.pop()
            if isinstance(one, str):
                num_bytes += _num_bytes(_string(one))
                if num_bytes > MAX_TEXT_BYTES:
                    raise _too_large()
            elif isinstance(one, (int, float)):
                _number(one)
            elif isinstance(one, (Mapping, list, tuple)):
                if depth >= MAX_DEPTH:
                    raise _too_deep()
                inner = [*one, *one.values()] if isinstance(one, Mapping) else one
                num_values += len(inner)
                if num_values > MAX_VALUES:
                    raise _too_many()
                waiting += ((item, depth + 1) for item in inner)
    except _InvalidError as error:
        raise error.at(label) from error


def _int(text: str) -> int:
    digits = text.replace("_", "").lstrip("+-")
    value = int(digits, 0) if digits[:2] in ("0x", "0o") else int(digits)
    return int(_number(-value if text[0] == "-" else value))


def _float(text: str) -> float:
    return _number(float(text.replace("_", "").lower().replace(".inf", "inf").replace(".nan", "nan")))


def _number(value: float) -> float:
    """Return ``value``; raise ``_InvalidError`` unless it is finite and fits 64 bits.

    JSON or a database cannot represent other numbers.
    """
    if not (-(2**63) <= value < 2**64 if isinstance(value, int) else math.isfinite(value)):
        raise _InvalidError("too large a number", "a finite number of 64 bits", "Put it into quotes.")
    return value


def _string(text: str) -> str:
    """Return ``text``; raise ``_InvalidError`` for NUL characters and lone surrogates.

    Environment variables cannot contain the former, UTF-8 cannot encode the latter.
    """
    if "\0" in text or (not text.isascii() and any("\ud800" <= one <= "\udfff" for one in text)):
        got = "a text with a NUL character or half a surrogate pair"
        raise _InvalidError(got, "Unicode characters other than NUL", "Remove the character.")
    return text


_TAG = "tag:yaml.org,2002:"
_MERGE = f"{_TAG}merge"
# YAML tag -> function that converts the text of a scalar.
_READERS: dict[str, Callable[[str], Any]] = {
    "null": lambda _text: None,
    "bool": lambda text: {"true": True, "false": False}[text.lower()],
    "int": _int,
    "float": _float,
    "str": _string,
}
_PLAIN = {
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "int": (r"[-+]?[0-9][0-9_]*|0x[0-9a-fA-F_]+|0o[0-7_]+", "-+0123456789"),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+0123456789.",
    ),
    "null": (r"~|null|Null|NULL|", ("~", "n", "N", "")),
    "merge": ("<<", "<"),
}
"""Tag -> (pattern of the tag's plain scalars in YAML 1.2's core schema, possible first characters)."""


class YamlLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # libyaml is ten times as fast
    """A YAML loader that resolves scalars by the core schema of YAML 1.2."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}


class _Dumper(yaml.SafeDumper):
    """A YAML dumper that quotes strings which YAML 1.1 or 1.2 reads as another type."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        """Escape Unicode line breaks, which other quoting styles would fold."""
        style = '"' if re.search("[\x85\u2028\u2029]", text) else None
        return self.represent_scalar(f"{_TAG}str", text, style=style)


_Dumper.add_representer(str, _Dumper.represent_text)
for _kind, (_pattern, _first) in _PLAIN.items():
    for _class in (YamlLoader, _Dumper):
        _class.add_implicit_resolver(f"{_TAG}{_kind}", re.compile(rf"(?:{_pattern})\Z"), [*_first])


def parse_yaml_value(text: str, label: str = "the value") -> Any:
    """Parse a value as in a config: ``4`` is an int, ``1e-5`` a float, ``[1]`` a list.

    Raises:
        ConfigError: the text is not YAML, has a duplicate key, or exceeds the limits. ``label`` names the text in the message.
    """
    return read_yaml_text(text, label).value


def yaml_text(value: Any) -> str:
    """Return plain values as YAML with the same meaning in YAML 1.1 and 1.2.

    PyYAML by default writes the string ``"2e-3"`` without quotes, which YAML 1.2 reads as a number.
    """
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)  # a SafeDumper
    return text


def read_yaml(path: Path, label: str) -> Document:
    """Read a YAML file; duplicate keys and exceeded limits are errors.

    ``label`` names the file in messages and in ``Document.lines``.
    """
    return read_yaml_text(_read_text(path, label), label)


def read_yaml_text(text: str, label: str) -> Document:
    if _num_bytes(text) > MAX_TEXT_BYTES:
        raise _too_large().at(label)
    try:
        if text.count("%TAG") > _MAX_TAG_DIRECTIVES:
            raise yaml.YAMLError(f"more than {_MAX_TAG_DIRECTIVES} %TAG directives")
        _check_events(text, label)
        root = yaml.compose(text, Loader=YamlLoader)
    except (yaml.YAMLError, UnicodeEncodeError) as error:
        raise _not_yaml(error, text, label) from error
    reader = _YamlReader(label)
    value = None if root is None else reader.value(root, ())
    if reader.problems:
        raise ConfigError(reader.problems)
    return Document(label, value, reader.lines)


def _not_yaml(error: Exception, text: str, label: str) -> ConfigError:
    mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
    got, fix = " ".join(str(error).split())[:200], "Correct it."
    if isinstance(error, yaml.MarkedYAMLError) and mark is not None:
        label, fix = f"{label}:{mark.line + 1}", "Correct this line."
        got = " ".join(part for part in (error.context, error.problem) if part)
        if "a tab " in got or text[mark.index : mark.index + 1] == "\t":
            got, fix = "indented with a tab", "Indent with spaces."
    return _InvalidError(f"not YAML ({got})", "valid YAML", fix).at(label)


def _check_events(text: str, label: str) -> None:
    """Raise ConfigError if YAML exceeds the limits of depth and number of values.

    Called before nodes are composed, because composing recurses and takes memory.
    """
    num_values = depth = 0
    for event in yaml.parse(text, Loader=YamlLoader):
        if isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        elif isinstance(event, yaml.NodeEvent) and event.start_mark is not None:
            num_values += 1
            depth += isinstance(event, yaml.CollectionStartEvent)
            if depth > MAX_DEPTH or num_values > MAX_VALUES:
                error = _too_deep() if depth > MAX_DEPTH else _too_many()
                raise error.at(f"{label}:{event.start_mark.line + 1}")


class _YamlReader:
    """Converts composed YAML nodes to values; an alias becomes a copy."""

    def __init__(self, label: str) -> None:
        self.lines: dict[KeyPath, str] = {(): f"{label}:1"}
        self.problems: list[ConfigProblem] = []
        self._label = label
        self._num_values = 0
        self._open: list[yaml.Node] = []  # path of nodes from the root

    def value(self, node: yaml.Node, path: KeyPath) -> Any:
        """Return the value of a node at ``path``; record the line of each descendant."""
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node)
        self._begin(node)
        value: Any
        if isinstance(node, yaml.SequenceNode):
            value = []
            for index, item in enumerate(node.value):
                self.lines[(*path, index)] = self._place(item)
                value.append(self.value(item, (*path, index)))
        else:
            value = {}
            for text, (name, key, item) in self._pairs(node, path).items():
                self.lines[(*path, text)] = self._place(key)
                value[name] = self.value(item, (*path, text))
        self._open.pop()
        return value

    def _begin(self, node: yaml.Node) -> None:
        """Check a list or mapping node, then push it onto ``_open``.

        ``_open`` is the stack of nodes that enclose the current node.
        """
        self._count(node)
        tag = "seq" if isinstance(node, yaml.SequenceNode) else "map"
        if node.tag != f"{_TAG}{tag}":
            raise self._invalid(node, f"the tag {node.tag[:60]!r}", "plain YAML", "Remove the tag.")
        if any(one is node for one in self._open):
            raise self._invalid(node, "an alias of itself", "an alias of an earlier value", "Write it out.")
        if len(self._open) >= MAX_DEPTH:
            raise _too_deep().at(self._place(node))
        self._open.append(node)

    def _pairs(self, node: yaml.Node, path: KeyPath) -> dict[str, tuple[Any, yaml.Node, yaml.Node]]:
        """Return a mapping's entries: text of the key -> (key, key's node, value's node).

        Entries that ``<<`` merges are included; the mapping's direct entries take precedence.
        """
        own: dict[str, tuple[Any, yaml.Node, yaml.Node]] = {}
        merged: dict[str, tuple[Any, yaml.Node, yaml.Node]] = {}
        texts: dict[Any, str] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise self._invalid(key, "a list or mapping as key", "a text as key", "Write a text instead.")
            if key.tag == _MERGE:
                for source in reversed(value.value if isinstance(value, yaml.SequenceNode) else [value]):
                    if not isinstance(source, yaml.MappingNode):
                        expected = "a mapping or a list of mappings"
                        raise self._invalid(
                            source, "merged with << and no mapping", expected, "Name an anchor of one."
                        )
                    self._begin(source)
                    merged.update(self._pairs(source, path))
                    self._open.pop()
                continue
            name = self._scalar(key)
            text = texts.setdefault(name, str(name))  # 1, 1.0 and true are the same dictionary key
            if text in own:
                first_line = own[text][1].start_mark.line + 1
                self.problems.append(_given_twice(self._place(key), (*path, text), first_line))
                if len(self.problems) >= MAX_PROBLEMS:
                    raise ConfigError(self.problems)
            own[text] = (name, key, value)
        return {**merged, **own}

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        self._count(node)
        # `<<` means a merge only as a key.
        kind = "str" if node.tag == _MERGE else node.tag.removeprefix(_TAG)
        if kind not in _READERS:
            raise self._invalid(node, f"the tag {node.tag[:60]!r}", "plain YAML", "Remove the tag.")
        try:
            return _READERS[kind](_string(node.value))
        except _InvalidError as error:
            raise error.at(self._place(node)) from error
        except (ValueError, KeyError) as error:
            got, expected = f"{node.value[:60]!r}, not a valid {kind}", f"a value of type {kind}"
            raise self._invalid(node, got, expected, "Correct it, or put it into quotes.") from error

    def _count(self, node: yaml.Node) -> None:
        self._num_values += 1
        if self._num_values > MAX_VALUES:
            raise _too_many().at(self._place(node))

    def _place(self, node: yaml.Node) -> str:
        return f"{self._label}:{node.start_mark.line + 1}"

    def _invalid(self, node: yaml.Node, got: str, expected: str, fix: str) -> ConfigError:
        return _InvalidError(got, expected, fix).at(self._place(node))


def _given_twice(place: str, path: KeyPath, first_line: int) -> ConfigProblem:
    got = f"given twice (first on line {first_line})"
    return ConfigProblem(f"{place}: {dotted(path)}", got, "every key once", "Remove one of the two.")


def read_json(path: Path, label: str) -> Document:
    """Read a JSON file: no comments, trailing commas, NaN or repeated keys.

    ``label`` names the file in messages and in ``Document.lines``.
    """
    return read_json_text(_read_text(path, label), label)


def read_json_text(text: str, label: str) -> Document:
    if _num_bytes(text) > MAX_TEXT_BYTES:
        raise _too_large().at(label)
    try:
        # The parser recurses in C and raises RecursionError long before the stack overflows; check_value checks the depth.
        value = json.loads(text, parse_constant=_float)
    except json.JSONDecodeError as error:
        raise _InvalidError(
            f"not JSON ({error.msg}, column {error.colno})",
            "strict JSON, without comments and without a comma after the last element",
            "Correct this line.",
        ).at(f"{label}:{error.lineno}") from error
    except _InvalidError as error:
        raise error.at(label) from error
    except ValueError as error:  # an integer of thousands of digits
        raise _InvalidError(str(error), "numbers of 64 bits", "Correct it.").at(label) from error
    except RecursionError as error:
        raise _too_deep().at(label) from error
    check_value(value, label)
    lines: dict[KeyPath, int] = {(): 1}
    problems: list[ConfigProblem] = []
    for path, line in _json_lines(text):
        if path in lines and len(problems) < MAX_PROBLEMS:
            problems.append(_given_twice(f"{label}:{line}", path, lines[path]))
        lines.setdefault(path, line)
    if problems:
        raise ConfigError(problems)
    return Document(label, value, {path: f"{label}:{line}" for path, line in lines.items()})


def _json_lines(text: str) -> Iterator[tuple[KeyPath, int]]:
    """Yield (key path, line number) of each key and list item of valid JSON."""
    path: list[Any] = []  # ends with None if a key comes next
    line, end = 1, 0
    for match in re.finditer(r'"[^"\\]*(?:\\.[^"\\]*)*"|[{}\[\],]|[^\s{}\[\],:"]+', text):
        line += text.count("\n", end, match.start())
        end = match.start()
        lexeme = match.group()
        if lexeme == ",":
            path[-1] = path[-1] + 1 if isinstance(path[-1], int) else None
        elif lexeme in "}]":
            path.pop()
        elif path and path[-1] is None:
            path[-1] = json.loads(lexeme)
            yield (*path,), line
        else:
            if path and isinstance(path[-1], int):
                yield (*path,), line
            if lexeme in "{[":
                path.append(None if lexeme == "{" else 0)


def _read_text(path: Path, label: str) -> str:
    try:
        with path.open("rb") as file:
            # The file's size is not used, because it is 0 for devices and pipes.
            content = file.read(MAX_TEXT_BYTES + 1)
        if len(content) > MAX_TEXT_BYTES:
            raise _too_large().at(label)
        return content.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except (OSError, UnicodeDecodeError) as error:
        got, fix = "not UTF-8 text", "Correct the file."
        if isinstance(error, FileNotFoundError):
            got, fix = "missing", "Correct the path."
        elif isinstance(error, OSError):
            got, fix = f"unreadable ({error.strerror})", "Correct the path or the file's permissions."
        raise ConfigError([ConfigProblem(f"{label}: the file", got, "a text file", fix)]) from error
