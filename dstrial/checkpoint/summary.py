"""Summarise an engine's layout."""

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
    """Parameter counts of one engine; a tied parameter counts once.

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
    """Yield once each parameter that owns its storage.

    Of a parameter that AutoTP has split over ranks, each slice is yielded.
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
    """Return experiment config and hyperparameters of a checkpoint; {} if unreadable."""
    try:
        values = json.loads((pathlib.Path(root) / "load_data.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}
