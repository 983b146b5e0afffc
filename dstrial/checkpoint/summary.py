"""Summarise an engine's layout, and compare two checkpoints."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from dstrial.checkpoint.layout import Layout, ParameterPlace


@dataclasses.dataclass(frozen=True, slots=True)
class ParameterCounts:
    """Parameter counts of one engine; tied parameters count as one parameter.

    Attributes:
        num_frozen: parameters that require no gradient.
        num_not_optimized: parameters that require a gradient but belong to no optimizer.
        tied: name of a tied parameter -> name of the parameter that owns the storage.
    """

    num_parameters: int
    num_elements: int
    num_frozen: int
    num_frozen_elements: int
    num_not_optimized: int
    tied: Mapping[str, str]


def own_places(layout: Layout) -> Iterator[ParameterPlace]:
    """Yield each parameter that owns its storage, without duplicates.

    If AutoTP has split a parameter over ranks, every slice is yielded.
    """
    seen = set()
    for place in layout.parameters:
        key = (place.name, place.model_part if layout.model_parallel_size > 1 else 0)
        if place.tied_to is None and key not in seen:
            seen.add(key)
            yield place


def tied_names(layout: Layout) -> dict[str, str]:
    """Return name -> name of the parameter that owns the storage, for tied parameters."""
    return {
        place.name: place.tied_to
        for place in layout.parameters
        if place.tied_to is not None and place.tied_to != place.name
    }


def count_parameters(layout: Layout) -> ParameterCounts:
    places = list(own_places(layout))
    frozen = [place for place in places if not place.trainable]
    return ParameterCounts(
        num_parameters=len(places),
        num_elements=sum(math.prod(place.shape) for place in places),
        num_frozen=len(frozen),
        num_frozen_elements=sum(math.prod(place.shape) for place in frozen),
        num_not_optimized=sum(place.trainable and place.group_idx is None for place in places),
        tied=tied_names(layout),
    )


def layout_fields(layout: Layout) -> dict[str, Any]:
    """Return an engine's layout as JSON values, without parameters and buffers."""
    return {
        field.name: dict(layout.versions) if field.name == "versions" else getattr(layout, field.name)
        for field in dataclasses.fields(layout)
        if field.name not in ("parameters", "buffers")
    }


def configuration_of(root: str | pathlib.Path) -> dict[str, Any]:
    """Return the content of a checkpoint's ``load_data.json``; {} if unreadable.

    Keys include ``experiment_config`` and ``hparams``.
    """
    try:
        values = json.loads((pathlib.Path(root) / "load_data.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


ABSENT = "absent"
"""Placeholder for a value that only one of two checkpoints has."""


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """A value that differs between checkpoints a and b; ``ABSENT`` where missing."""

    key: str
    a: Any
    b: Any

    def __str__(self) -> str:
        return f"{self.key}: {self.a!r} -> {self.b!r}"


def compare(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Difference]:
    """Compare nested JSON values; return a difference for each leaf that differs.

    Lists are leaves, except for lists of mappings.
    """
    left, right = _flat(a), _flat(b)
    return [
        Difference(key, left.get(key, ABSENT), right.get(key, ABSENT))
        for key in [*left, *(key for key in right if key not in left)]
        if left.get(key, ABSENT) != right.get(key, ABSENT)
    ]


def compare_layouts(a: Layout, b: Layout) -> list[Difference]:
    """Compare two engines' parallel sizes, ZeRO settings, optimizers and versions."""
    return compare(layout_fields(a), layout_fields(b))


def compare_parameters(a: Layout, b: Layout) -> list[Difference]:
    """Compare two engines' parameters: shape, dtype, whether frozen or tied."""
    return compare(_parameters(a), _parameters(b))


def _parameters(layout: Layout) -> dict[str, Any]:
    described: dict[str, Any] = {}
    for place in layout.parameters:
        text = f"{'x'.join(map(str, place.shape)) or 'scalar'} {place.dtype}"
        text += "" if place.trainable else ", frozen"
        if place.tied_to not in (None, place.name):
            text += f", tied to {place.tied_to}"
        described.setdefault(place.name, text)
    return described


def _flat(values: Any, prefix: str = "") -> dict[str, Any]:
    items: list[tuple[str, Any]] | None = None
    if isinstance(values, Mapping):
        items = [(str(key), value) for key, value in values.items()]
    elif isinstance(values, list) and values and all(isinstance(value, Mapping) for value in values):
        items = [(str(idx), value) for idx, value in enumerate(values)]
    if not items:
        return {prefix: values} if prefix else {}
    flat: dict[str, Any] = {}
    for key, value in items:
        flat |= _flat(value, f"{prefix}.{key}" if prefix else key)
    return flat
