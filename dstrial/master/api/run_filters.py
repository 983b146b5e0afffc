"""Filters and orders of runs and experiments, as the protocol's texts have them.

Source: the ``filter`` and ``sort`` of Determined 0.38.1's ``SearchRunsRequest`` and ``SearchExperimentsRequest``: a JSON tree of
groups and fields, and ``column=asc`` separated by commas.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import orjson

from dstrial.errors import RequestError
from dstrial.master.api.table_columns import Row, Table, below
from dstrial.master.http.fields import shown

_SUMMARIES = {"training": "avg_metrics", "validation": "validation_metrics"}
HPARAM, METADATA = "hp", "metadata"
"""What the names of such columns begin with."""

_MAX_DEPTH = 20
_MAX_CHARS = 2**16
_MAX_FIELDS = 200
"""So many fields of a filter are looked at for each row."""
_MAX_SORT = 20


def wanted_by(text: str | None, table: Table[Row]) -> Callable[[Row], bool]:
    """Return whether a filter wants a row of a table.

    An empty one wants those not archived.

    Raises:
        RequestError: 400, it is no such filter.
    """
    if not text:
        return lambda row: not table.is_archived(row)
    if len(text) > _MAX_CHARS:
        raise _wrong(table, text, f"at most {_MAX_CHARS} characters")
    try:
        tree = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise _wrong(table, text, f"JSON ({error})") from error
    if not isinstance(tree, dict):
        raise _wrong(table, text, "an object with filterGroup")
    if text.count('"field"') > _MAX_FIELDS:
        raise _wrong(table, text, f"at most {_MAX_FIELDS} fields")
    group = tree.get("filterGroup")
    matches = None if group is None else _node(group, 0, table)
    shows_archived = bool(tree.get("showArchived"))
    return lambda row: (shows_archived or not table.is_archived(row)) and (matches is None or matches(row))


def _node(node: Any, depth: int, table: Table[Row]) -> Callable[[Row], bool]:
    if not isinstance(node, dict) or depth > _MAX_DEPTH:
        raise _wrong(table, node, f"groups and fields, at most {_MAX_DEPTH} deep")
    if node.get("kind") == "group":
        given = node.get("children") or []
        if not isinstance(given, list):
            raise _wrong(table, given, "a list of children")
        children = [_node(child, depth + 1, table) for child in given]
        if node.get("conjunction") not in ("and", "or"):
            raise _wrong(table, node.get("conjunction"), "the conjunction and, or or")
        if not children:
            return lambda _row: True
        together = all if node["conjunction"] == "and" else any
        return lambda row: together(child(row) for child in children)
    if node.get("kind") != "field":
        raise _wrong(table, node.get("kind"), "the kind group or field")
    find = _column(node.get("columnName"), table)
    compare = _OPERATORS.get(str(node.get("operator")))
    if compare is None:
        raise _wrong(table, node.get("operator"), "one of the operators " + ", ".join(_OPERATORS))
    value = node.get("value")
    if isinstance(value, (dict, list)):
        raise _wrong(table, value, "a text, a number, a flag or null")
    return lambda row: compare(find(row), value)


def _column(name: Any, table: Table[Row]) -> Callable[[Row], Any]:
    """Return how to read a column: a row's own, a hyperparameter, metric or metadata.

    Raises:
        RequestError: 400, there is none of this name.
    """
    if isinstance(name, str) and name in table.columns:
        return table.columns[name].find
    kind, _, rest = name.partition(".") if isinstance(name, str) else ("", "", "")
    if rest and kind == HPARAM:
        return lambda row: table.hparam(row, rest.split("."))
    if rest and kind == METADATA:
        return lambda row: below(json.loads(table.metadata(row)), rest.split("."))
    metric, _, summary = rest.rpartition(".")
    if metric:
        group = _SUMMARIES.get(kind, kind)
        return lambda row: below(json.loads(table.summaries(row)), [group, metric, summary])
    raise _wrong(table, name, f"a column of {table.noun}, hp.NAME, GROUP.METRIC.SUMMARY or metadata.KEY")


def column_kinds(text: str | None, sort: str | None, table: Table[Row]) -> set[str]:
    """Return what a filter and an order ask about besides columns of their own.

    That is ``hp``, and groups of metrics. Both have been accepted.
    """
    names = [part.partition("=")[0] for part in (sort or "").split(",")]
    pending = [orjson.loads(text).get("filterGroup")] if text else []
    while pending:
        node = pending.pop()
        if isinstance(node, dict):
            children = node.get("children")
            pending += children if isinstance(children, list) else []
            names.append(str(node.get("columnName")))
    return {name.partition(".")[0] for name in names if "." in name and name not in table.columns}


def _is_equal(found: Any, value: Any) -> bool:
    if isinstance(found, list):
        return value in found
    if isinstance(found, str) and isinstance(value, str):
        return found.casefold() == value.casefold()
    return bool(found == value)


def _contains(found: Any, value: Any) -> bool:
    texts = found if isinstance(found, list) else [found]
    return any(str(value).casefold() in str(text).casefold() for text in texts if text is not None)


def _ordered(compare: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    """Return a comparison that is false where the two cannot be compared.

    Of a list's values one is enough.
    """

    def check(found: Any, value: Any) -> bool:
        if isinstance(found, list):
            return any(check(one, value) for one in found)
        both_numbers = all(
            isinstance(one, (int, float)) and not isinstance(one, bool) for one in (found, value)
        )
        both_texts = isinstance(found, str) and isinstance(value, str)
        return (both_numbers or both_texts) and compare(found, value)

    return check


def _is_empty(found: Any) -> bool:
    return found is None or found == "" or found == []


_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "=": _is_equal,
    "!=": lambda found, value: not _is_equal(found, value),
    ">": _ordered(lambda found, value: found > value),
    ">=": _ordered(lambda found, value: found >= value),
    "<": _ordered(lambda found, value: found < value),
    "<=": _ordered(lambda found, value: found <= value),
    "contains": _contains,
    "notContains": lambda found, value: not _contains(found, value),
    "isEmpty": lambda found, _value: _is_empty(found),
    "notEmpty": lambda found, _value: not _is_empty(found),
}


def in_order(rows: list[Row], text: str | None, table: Table[Row]) -> list[Row]:
    """Return rows in the order of a ``sort``; what has no value comes last.

    Raises:
        RequestError: 400, it is no such order.
    """
    parts = [part for part in (text or "").split(",") if part]
    if len(parts) > _MAX_SORT:
        raise _wrong(table, f"{len(parts)} columns in sort", f"at most {_MAX_SORT}")
    for part in reversed(parts):
        name, _, direction = part.partition("=")
        if direction not in ("asc", "desc"):
            raise _wrong(table, part, "COLUMN=asc or COLUMN=desc")
        find = _column(name, table)
        found = [(find(row), row) for row in rows]
        known = [(_key(value), row) for value, row in found if not _is_empty(value)]
        known.sort(key=lambda pair: pair[0], reverse=direction == "desc")
        rows = [row for _, row in known] + [row for value, row in found if _is_empty(value)]
    return rows


def _key(value: Any) -> tuple[int, float, str]:
    """Return what orders values of several types: numbers first, then texts."""
    if isinstance(value, (int, float)) and not math.isnan(value):
        return (0, float(value), "")
    return (1, 0.0, str(value).casefold())


def _wrong(table: Table[Any], got: Any, expected: str) -> RequestError:
    return RequestError(
        400,
        f"the filter or sort of {table.noun} has {shown(got)}; expected {expected}. Send it as the protocol has it.",
    )
