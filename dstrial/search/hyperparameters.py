"""Concrete hyperparameters of a trial: sampled at random, or a point of a grid."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

from dstrial.config.hyperparameters import is_specification
from dstrial.search.random_state import SearchRandom

_Route = tuple[str, ...]


def sample(hyperparameters: Mapping[str, Any], random: SearchRandom, route: _Route = ()) -> dict[str, Any]:
    """Draw one value of every hyperparameter, in the order of their names at every level."""
    values: dict[str, Any] = {}
    for name in sorted(hyperparameters):
        spec = hyperparameters[name]
        inner = (*route, name)
        if not isinstance(spec, Mapping):
            values[name] = spec
        elif is_specification(spec, inner):
            values[name] = _sample_one(spec, random)
        else:
            values[name] = sample(spec, random, inner)
    return {name: values[name] for name in hyperparameters}


def _sample_one(spec: Mapping[str, Any], random: SearchRandom) -> Any:
    kind = spec["type"]
    if kind == "const":
        return spec["val"]
    if kind == "categorical":
        return spec["vals"][random.integer_below(len(spec["vals"]))]
    if kind == "int":
        return spec["minval"] + random.integer_below(spec["maxval"] - spec["minval"] + 1)
    drawn = random.uniform(spec["minval"], spec["maxval"])
    return float(spec["base"]) ** drawn if kind == "log" else drawn


def grid_points(hyperparameters: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return every point of the grid; the first axis in the order of names varies slowest.

    Source: Determined 0.38.1, grid searcher; numbers are rounded half away from zero.
    """
    axes = list(_axes(hyperparameters, ()))
    points = []
    for values in itertools.product(*(axis for _, axis in axes)):
        point: dict[str, Any] = {}
        for (route, _), value in zip(axes, values, strict=True):
            at = point
            for key in route[:-1]:
                at = at.setdefault(key, {})
            at[route[-1]] = value
        points.append(point)
    return points


def _axes(hyperparameters: Mapping[str, Any], route: _Route) -> Iterator[tuple[_Route, list[Any]]]:
    for name in sorted(hyperparameters):
        spec = hyperparameters[name]
        inner = (*route, name)
        if not isinstance(spec, Mapping):
            yield inner, [spec]
        elif is_specification(spec, inner):
            yield inner, _axis(spec)
        elif not spec:
            yield inner, [{}]
        else:
            yield from _axes(spec, inner)


def _axis(spec: Mapping[str, Any]) -> list[Any]:
    kind = spec["type"]
    if kind == "const":
        return [spec["val"]]
    if kind == "categorical":
        return list(spec["vals"])
    low, high, count = spec["minval"], spec["maxval"], spec["count"]
    if kind == "int":
        count = min(count, high - low + 1)
    positions = (
        [(low + high) / 2] if count == 1 else [low + i * (high - low) / (count - 1) for i in range(count)]
    )
    if kind == "int":
        return [_round_half_away(position) for position in positions]
    return [float(spec["base"]) ** position for position in positions] if kind == "log" else positions


def _round_half_away(value: float) -> int:
    return int(math.copysign(math.floor(abs(value) + 0.5), value))
