"""How two checkpoints differ in what was configured: plain values compared key by key; pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from dstrial.checkpoint.layout import Layout
from dstrial.checkpoint.summary import layout_fields

ABSENT = "absent"
"""Stands for a value that one side does not have."""


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """One value in which two checkpoints differ.

    Attributes:
        key: where it stands, with dots.
        a: the first one's; ``ABSENT`` if it has none.
        b: the second one's, likewise.
    """

    key: str
    a: Any
    b: Any

    def __str__(self) -> str:
        return f"{self.key}: {self.a!r} -> {self.b!r}"


def compare(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Difference]:
    """Compare two nested mappings of plain JSON values.

    Returns:
        One difference per leaf, in the order of the first, then what only the second one has. Lists are leaves, unless
        both are as long and hold mappings.
    """
    left, right = _flat(a), _flat(b)
    return [
        Difference(key, left.get(key, ABSENT), right.get(key, ABSENT))
        for key in [*left, *(key for key in right if key not in left)]
        if left.get(key, ABSENT) != right.get(key, ABSENT)
    ]


def compare_layouts(a: Layout, b: Layout) -> list[Difference]:
    """Compare how two engines lay over their ranks, versions included; where elements lie is not looked at."""
    return compare(layout_fields(a), layout_fields(b))


def compare_parameters(a: Layout, b: Layout) -> list[Difference]:
    """Compare which parameters two engines have, their shapes and types, which are trained and which are tied."""
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
