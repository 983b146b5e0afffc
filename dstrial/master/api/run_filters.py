"""Filters and orders of runs, as the protocol's texts have them.

Source: the ``filter`` and ``sort`` of Determined 0.38.1's ``SearchRunsRequest``: a JSON tree of groups and fields, and
``column=asc`` separated by commas.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import orjson

from dstrial.config.secrets import SecretNames, masked_json
from dstrial.errors import RequestError
from dstrial.master.clock import format_us, now_us
from dstrial.master.http.fields import shown
from dstrial.master.store.listings import Run

Wanted: TypeAlias = "Callable[[Run], bool]"

_COLUMNS: dict[str, Callable[[Run], Any]] = {
    "id": lambda row: row.id,
    "experimentId": lambda row: row.experiment_id,
    "experimentName": lambda row: row.experiment_name,
    "name": lambda row: row.experiment_name,
    "experimentDescription": lambda row: row.experiment_description,
    "description": lambda row: row.experiment_description,
    "tags": lambda row: json.loads(row.labels),
    "forkedFrom": lambda row: row.parent_id,
    "startTime": lambda row: format_us(row.start_us),
    "endTime": lambda row: None if row.end_us is None else format_us(row.end_us),
    "duration": lambda row: ((row.end_us or now_us()) - row.start_us) // 1_000_000,
    "state": lambda row: row.state,
    "searcherType": lambda row: row.searcher_type,
    "searcherMetric": lambda row: row.searcher_metric,
    "searcherMetricsVal": lambda row: row.searcher_metric_value,
    "user": lambda row: row.username,
    "userId": lambda row: row.owner_id,
    "numTrials": lambda row: row.num_trials,
    "experimentProgress": lambda row: row.experiment_progress,
    "checkpointCount": lambda row: row.checkpoint_count,
    "checkpointSize": lambda row: row.checkpoint_size,
    "projectId": lambda row: row.project_id,
    "archived": lambda row: bool(row.experiment_archived),
    "isExpMultitrial": lambda row: row.num_trials > 1,
    "localId": lambda row: f"{row.project_key}-{row.id}",
    "externalRunId": lambda row: row.external_id,
}
_SUMMARIES = {"training": "avg_metrics", "validation": "validation_metrics"}
_MAX_DEPTH = 20
_MAX_CHARS = 2**16


def wanted_by(text: str | None) -> Wanted:
    """Return whether a filter wants a run; an empty one wants those not archived.

    Raises:
        RequestError: 400, it is no such filter.
    """
    if not text:
        return lambda row: not row.experiment_archived
    if len(text) > _MAX_CHARS:
        raise _wrong(text, f"at most {_MAX_CHARS} characters")
    try:
        tree = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise _wrong(text, f"JSON ({error})") from error
    if not isinstance(tree, dict):
        raise _wrong(text, "an object with filterGroup")
    group = tree.get("filterGroup")
    matches = _node(group, 0) if group is not None else lambda _row: True
    shows_archived = bool(tree.get("showArchived"))
    return lambda row: (shows_archived or not row.experiment_archived) and matches(row)


def _node(node: Any, depth: int) -> Wanted:
    if not isinstance(node, dict) or depth > _MAX_DEPTH:
        raise _wrong(node, f"groups and fields, at most {_MAX_DEPTH} deep")
    if node.get("kind") == "group":
        children = [_node(child, depth + 1) for child in node.get("children") or []]
        if node.get("conjunction") not in ("and", "or"):
            raise _wrong(node.get("conjunction"), "the conjunction and, or or")
        if not children:
            return lambda _row: True
        together = all if node["conjunction"] == "and" else any
        return lambda row: together(child(row) for child in children)
    if node.get("kind") != "field":
        raise _wrong(node.get("kind"), "the kind group or field")
    find = _column(node.get("columnName"))
    compare = _OPERATORS.get(str(node.get("operator")))
    if compare is None:
        raise _wrong(node.get("operator"), "one of the operators " + ", ".join(_OPERATORS))
    value = node.get("value")
    if isinstance(value, (dict, list)):
        raise _wrong(value, "a text, a number, a flag or null")
    return lambda row: compare(find(row), value)


def _column(name: Any) -> Callable[[Run], Any]:
    """Return how to read a column: a run's own, a hyperparameter, metric or metadata.

    Raises:
        RequestError: 400, there is none of this name.
    """
    if isinstance(name, str) and name in _COLUMNS:
        return _COLUMNS[name]
    kind, _, rest = name.partition(".") if isinstance(name, str) else ("", "", "")
    if rest and kind == "hp":
        # As it is shown: nobody is to guess a secret by asking what it is greater than.
        return lambda row: _below(json.loads(masked_json(row.hparams, SecretNames())), rest.split("."))
    if rest and kind == "metadata":
        return lambda row: _below(json.loads(row.metadata or "{}"), rest.split("."))
    metric, _, summary = rest.rpartition(".")
    if metric:
        group = _SUMMARIES.get(kind, kind)
        return lambda row: _below(json.loads(row.summary_metrics), [group, metric, summary])
    raise _wrong(name, "a column of a run, hp.NAME, GROUP.METRIC.SUMMARY or metadata.KEY")


def _below(value: Any, keys: list[str]) -> Any:
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


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
    """Return a comparison that is false where the two cannot be compared."""

    def check(found: Any, value: Any) -> bool:
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


def in_order(rows: list[Run], text: str | None) -> list[Run]:
    """Return rows in the order of a ``sort``; what has no value comes last.

    Raises:
        RequestError: 400, it is no such order.
    """
    for part in reversed([part for part in (text or "").split(",") if part]):
        name, _, direction = part.partition("=")
        if direction not in ("asc", "desc"):
            raise _wrong(part, "COLUMN=asc or COLUMN=desc")
        find = _column(name)
        known = [row for row in rows if not _is_empty(find(row))]
        unknown = [row for row in rows if _is_empty(find(row))]
        rows = sorted(known, key=lambda row: _key(find(row)), reverse=direction == "desc") + unknown
    return rows


def _key(value: Any) -> tuple[int, float, str]:
    """Return what orders values of several types: numbers first, then texts."""
    if isinstance(value, (int, float)) and not math.isnan(value):
        return (0, float(value), "")
    return (1, 0.0, str(value).casefold())


def _wrong(got: Any, expected: str) -> RequestError:
    return RequestError(
        400,
        f"the filter or sort of runs has {shown(got)}; expected {expected}. Send it as the protocol has it.",
    )
