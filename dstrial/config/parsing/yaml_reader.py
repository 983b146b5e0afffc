"""Read YAML within limits: how many values, how deep, none that holds itself.

PyYAML's own composer recurses with the nesting of the text, and shares what aliases name, so that a short text can hold
more values than any memory once something walks or writes it. Here libyaml's events, which come one by one whatever the
text is, are counted as they come; an alias counts as much as what it names, and becomes a copy of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import yaml

from dstrial.config.diagnostics import MAX_PROBLEMS, KeyPath, dotted
from dstrial.config.parsing.limits import MAX_DEPTH, MAX_KEY_CHARS, TextLimits, too_deep, too_many
from dstrial.config.parsing.yaml_scalars import MERGE_KEY, ScalarError, is_group_tag, scalar, unknown_tag
from dstrial.errors import ConfigError, ConfigProblem

# Ten times as fast; PyYAML's wheels have it, a build of its sources may not.
_PARSER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_MAX_DIRECTIVES = 100


@dataclasses.dataclass(slots=True, eq=False)
class _Node:
    """One value of the text."""

    kind: str  # `scalar`, `list` or `mapping`
    line: int  # from 1
    text: str = ""
    value: Any = None
    is_merge: bool = False  # whether it is the plain `<<`
    # Of an open mapping: keys and values in turn.
    items: list[_Node] = dataclasses.field(default_factory=list)
    # Of a closed mapping, by the key's text, merged ones included.
    pairs: dict[str, tuple[_Node, _Node]] = dataclasses.field(default_factory=dict)
    size: int = 1  # values with aliases written out; 0 while open
    height: int = 0  # levels of lists and mappings, 0 for a scalar


def read(text: str, label: str, limits: TextLimits) -> tuple[Any, dict[KeyPath, str]]:
    """Return a YAML text's value, and ``label:line`` of every key and item in it."""
    try:
        root = _Composer(text, label, limits).root()
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        reason = " ".join(part for part in (error.context, error.problem) if part)
        if "nesting depth" in reason:  # PyYAML 6.0.4 stops by itself, before it gives us the first event
            raise ConfigError([too_deep(f"{label}:{line}")]) from error
        mark = error.problem_mark
        if "a tab " in reason or (mark and text[mark.index : mark.index + 1] == "\t"):
            raise _not_yaml(f"{label}:{line}", "indented with a tab", "Indent with spaces.") from error
        raise _not_yaml(f"{label}:{line}", reason, "Correct this line.") from error
    except yaml.YAMLError as error:
        # Of a character that YAML does not have; its position is in the error's second line.
        raise _not_yaml(label, " ".join(str(error).split()), "Remove this character.") from error
    except UnicodeEncodeError as error:
        raise _not_yaml(label, "half a surrogate pair, no character", "Remove this character.") from error
    lines: dict[KeyPath, str] = {(): f"{label}:1"}
    return (None if root is None else _value(root, (), f"{label}:", lines)), lines


def _line(event: Any) -> int:
    return int(event.start_mark.line) + 1


def _not_yaml(where: str, reason: str, fix: str) -> ConfigError:
    return ConfigError([ConfigProblem(f"{where}: the text", f"not YAML ({reason})", "valid YAML", fix)])


class _Composer:
    """Assembles the events of one text, and stops at the first that exceeds a limit."""

    def __init__(self, text: str, label: str, limits: TextLimits) -> None:
        self._text = text
        self._label = label
        self._limits = limits
        self._anchors: dict[str, _Node] = {}
        self._open: list[_Node] = []
        self._num_values = 0
        self._problems: list[ConfigProblem] = []

    def root(self) -> _Node | None:
        if self._text.count("%TAG") > _MAX_DIRECTIVES:
            # libyaml compares each with all before it.
            raise _not_yaml(self._label, f"more than {_MAX_DIRECTIVES} %TAG directives", "Remove them.")
        root: _Node | None = None
        has_document = False
        for event in self._events():
            if isinstance(event, yaml.DocumentStartEvent):
                if has_document:
                    where = f"{self._label}:{_line(event)}"
                    raise _not_yaml(where, "a second document begins", "Send one document.")
                has_document = True
            node = self._take(event)
            if node is not None and not self._open:
                root = node
        if self._problems:
            raise ConfigError(self._problems)
        return root

    def _events(self) -> Iterator[Any]:
        loader = _PARSER(self._text)
        try:
            while loader.check_event():
                yield loader.get_event()
        finally:
            loader.dispose()

    def _take(self, event: Any) -> _Node | None:
        """Return the value that an event completes, or None."""
        if isinstance(event, yaml.ScalarEvent):
            node = self._scalar(event)
        elif isinstance(event, yaml.AliasEvent):
            return self._put(self._named(event), event)
        elif isinstance(event, yaml.CollectionStartEvent):
            self._begin(event)
            return None
        elif isinstance(event, yaml.CollectionEndEvent):
            return self._put(self._end(), None)
        else:
            return None
        if event.anchor is not None:
            self._anchors[event.anchor] = node
        return self._put(node, event)

    def _scalar(self, event: Any) -> _Node:
        line = _line(event)
        is_plain = event.implicit[0]
        try:
            value = scalar(event.value, event.tag, is_plain=is_plain)
        except ScalarError as error:
            raise self._wrong(line, error) from error
        is_merge = is_plain and event.value == MERGE_KEY
        return _Node("scalar", line, event.value, value, is_merge)

    def _named(self, event: Any) -> _Node:
        node, line = self._anchors.get(event.anchor), _line(event)
        if node is None:
            raise _not_yaml(
                f"{self._label}:{line}", f"an alias of no anchor, *{event.anchor}", "Correct this line."
            )
        if not node.size:
            problem = ConfigProblem(
                f"{self._label}:{line}: *{event.anchor}",
                "an alias of what it stands in, which so holds itself",
                "an alias of something that ends before it",
                "Write the values out.",
            )
            raise ConfigError([problem])
        if len(self._open) + node.height > MAX_DEPTH:
            raise ConfigError([too_deep(f"{self._label}:{line}")])
        return node

    def _begin(self, event: Any) -> None:
        line = _line(event)
        kind, tag = ("list", "seq") if isinstance(event, yaml.SequenceStartEvent) else ("mapping", "map")
        if not is_group_tag(event.tag, tag):
            raise self._wrong(line, unknown_tag(event.tag, f"a {kind}"))
        if len(self._open) >= MAX_DEPTH:
            raise ConfigError([too_deep(f"{self._label}:{line}")])
        node = _Node(kind, line, size=0)
        self._check_key(node)
        if event.anchor is not None:
            self._anchors[event.anchor] = node
        self._open.append(node)
        self._count(1, line)

    def _end(self) -> _Node:
        node = self._open.pop()
        if node.kind == "mapping":
            self._close_mapping(node)
            below = [one for pair in node.pairs.values() for one in pair]
        else:
            below = node.items
        node.size = 1 + sum(one.size for one in below)
        node.height = 1 + max((one.height for one in below), default=0)
        return node

    def _put(self, node: _Node, event: Any) -> _Node:
        """Add a value to the open collection; count it if its events were not counted."""
        if event is not None:
            self._count(node.size, _line(event))
        if self._open:
            self._check_key(node)
            self._open[-1].items.append(node)
        return node

    def _count(self, num_values: int, line: int) -> None:
        self._num_values += num_values
        if self._num_values > self._limits.num_values:
            raise ConfigError([too_many(f"{self._label}:{line}", self._limits)])

    def _check_key(self, node: _Node) -> None:
        """Refuse what comes where a mapping's next key must stand and can be none."""
        if not self._open or self._open[-1].kind != "mapping" or len(self._open[-1].items) % 2:
            return
        if node.kind != "scalar":
            got = f"a {node.kind} as key"
        elif len(node.text) > MAX_KEY_CHARS:
            got = f"a key of {len(node.text)} characters"
        else:
            return
        raise self._wrong(
            node.line,
            ScalarError(got, f"a key of at most {MAX_KEY_CHARS} characters", "Write a text instead."),
        )

    def _close_mapping(self, node: _Node) -> None:
        """Pair keys and values; merged mappings come below them."""
        own: dict[str, tuple[_Node, _Node]] = {}
        by_value: dict[Any, _Node] = {}
        keys = iter(node.items)
        merged: list[_Node] | None = None
        for key, value in zip(keys, keys, strict=True):
            first = own[key.text][0] if key.text in own else by_value.get(key.value)
            if first is not None:
                self._given_twice(key, first)
            own[key.text] = (key, value)
            by_value[key.value] = key
            if key.is_merge:
                merged = self._merged(value)
        if merged is not None:
            del own[MERGE_KEY]
            for source in reversed(merged):
                node.pairs.update(source.pairs)
        node.pairs.update(own)
        node.items = []

    def _merged(self, value: _Node) -> list[_Node]:
        """Return the mappings that ``<<`` names, the one that wins first."""
        sources = value.items if value.kind == "list" else [value]
        for source in sources:
            if source.kind != "mapping":
                error = ScalarError(
                    f"merged with << and a {source.kind}",
                    "a mapping or a list of mappings",
                    "Name an anchor of one.",
                )
                raise self._wrong(source.line, error)
        return sources

    def _given_twice(self, key: _Node, first: _Node) -> None:
        path = (*self._path(), key.text)
        problem = given_twice(f"{self._label}:{key.line}", path, first.line)
        self._problems.append(problem)
        if len(self._problems) >= MAX_PROBLEMS:
            raise ConfigError(self._problems)

    def _path(self) -> KeyPath:
        """Return the keys that lead to the collection closed last."""
        return tuple(
            node.items[-1].text if node.kind == "mapping" else len(node.items) for node in self._open
        )

    def _wrong(self, line: int, error: ScalarError) -> ConfigError:
        where = f"{self._label}:{line}: the text"
        return ConfigError([ConfigProblem(where, f"{error.got}", error.expected, error.fix)])


def given_twice(place: str, path: KeyPath, first_line: int) -> ConfigProblem:
    return ConfigProblem(
        f"{place}: {dotted(path)}",
        f"given twice (first on line {first_line})",
        "every key once",
        "Remove one of the two.",
    )


def _value(node: _Node, path: KeyPath, label: str, lines: dict[KeyPath, str]) -> Any:
    """Return the value of a node, and record the lines of everything below it."""
    if node.kind == "scalar":
        return node.value
    if node.kind == "list":
        items = []
        for index, item in enumerate(node.items):
            inner: KeyPath = (*path, index)
            lines[inner] = f"{label}{item.line}"
            items.append(_value(item, inner, label, lines))
        return items
    values = {}
    for text, (key, value) in node.pairs.items():
        inner = (*path, text)
        lines[inner] = f"{label}{key.line}"
        values[key.value] = _value(value, inner, label, lines)
    return values
