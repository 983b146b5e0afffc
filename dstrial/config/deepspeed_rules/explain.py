"""Say for every value of an effective DeepSpeed config where it comes from."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

from dstrial.config.batch import BATCH_KEYS
from dstrial.config.deepspeed_rules.check import CheckResult
from dstrial.config.deepspeed_source import DeepSpeedSource
from dstrial.config.diagnostics import KeyPath, dotted, locate
from dstrial.config.dotted_keys import value_at
from dstrial.config.keys import AUTO

DEFAULT_ORIGIN = "DeepSpeed's default"


@dataclasses.dataclass(frozen=True, slots=True)
class ExplainedValue:
    """One setting.

    Attributes:
        key: dotted key.
        value: the value DeepSpeed runs with, rendered as JSON.
        origin: ``file:line``, "overwrite_deepspeed_args (file:line)", "solved", "DeepSpeed's default", or who fills it in.
    """

    key: str
    value: str
    origin: str


def explain(source: DeepSpeedSource, checked: CheckResult) -> tuple[ExplainedValue, ...]:
    """List every setting of a config that was checked, with its value and origin."""
    # First the batch sizes, then what was set, then DeepSpeed's defaults.
    effective = checked.effective
    rows = [_row((key,), effective[key], source, checked) for key in BATCH_KEYS]
    others = [
        _row(path, leaf, source, checked)
        for key in sorted(effective)
        if key not in BATCH_KEYS
        for path, leaf in _leaves(effective[key], (key,))
    ]
    return (*rows, *sorted(others, key=lambda row: row.origin.startswith(DEFAULT_ORIGIN)))


def _leaves(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _leaves(inner, (*path, key))
    else:
        yield path, value


def _row(path: KeyPath, value: Any, source: DeepSpeedSource, checked: CheckResult) -> ExplainedValue:
    says = checked.filled.get(dotted(path))
    if says is not None and not (checked.batch is not None and path[0] in checked.batch.solved):
        place = locate(source.lines, path, source.label)
        return ExplainedValue(dotted(path), json.dumps(AUTO), f"{says} ({place})")
    return ExplainedValue(
        dotted(path), json.dumps(value, ensure_ascii=False), _origin(path, value, source, checked)
    )


def _origin(path: KeyPath, value: Any, source: DeepSpeedSource, checked: CheckResult) -> str:
    if checked.batch is not None and path[0] in checked.batch.solved:
        return "solved"
    given = value_at(source.merged, path)
    if given is None and value is not None:
        return DEFAULT_ORIGIN
    if given == AUTO and value != AUTO:
        return f'{DEFAULT_ORIGIN} ("auto" in {locate(source.lines, path, source.label)})'
    if given is None and not _is_mentioned(source.merged, path):
        return DEFAULT_ORIGIN
    place = locate(source.lines, path, source.label)
    is_overwritten = any(path[:length] in source.overwritten for length in range(1, len(path) + 1))
    return f"overwrite_deepspeed_args ({place})" if is_overwritten else place


def _is_mentioned(config: Any, path: KeyPath) -> bool:
    parent = value_at(config, path[:-1])
    return isinstance(parent, Mapping) and path[-1] in parent
