"""Compare two saved engines by parameter, independently of their layouts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator

import torch

from dstrial.engine.checkpoint_reader.saved_engine import MASTER, SavedEngine

_PIECE_NUMEL = 1 << 20  # elements of each engine in memory at a time


@dataclasses.dataclass(frozen=True, slots=True)
class WeightDifference:
    """Difference of one parameter's weights or optimizer state in checkpoints a and b.

    ``key`` is ``master`` for master weights, otherwise the optimizer's state key. NaN equals NaN. Norms are Euclidean.
    """

    name: str
    key: str
    numel: int
    num_differing: int
    norm_a: float
    norm_b: float
    norm_difference: float
    max_difference: float

    @property
    def relative(self) -> float:
        """Norm of the difference divided by the larger norm; 0 if both norms are 0."""
        larger = max(self.norm_a, self.norm_b)
        return self.norm_difference / larger if larger else 0.0


def comparable(a: SavedEngine, b: SavedEngine) -> list[str]:
    """Return the names of parameters that both engines have, with equal shapes.

    The names are in the order of ``a``. A tied parameter has only its owner's name.
    """
    return [
        name
        for name, place in a.places.items()
        if place.tied_to is None
        and name in b.places
        and b.places[name].shape == place.shape
        and a.holds(name)
        and b.holds(name)
    ]


def weight_differences(
    a: SavedEngine,
    b: SavedEngine,
    *,
    with_optimizer: bool = False,
    on_bytes: Callable[[int], None] | None = None,
) -> Iterator[WeightDifference]:
    """Yield the differences of each parameter's weights in two saved engines.

    Only the parameters of ``comparable`` are compared, in double precision. If ``with_optimizer``, optimizer state that both
    engines have is compared too. ``on_bytes`` is called with the number of bytes compared since the previous call.
    """
    for name in comparable(a, b):
        keys = [MASTER]
        if with_optimizer:
            theirs = b.state_keys(name)
            keys += [key for key in a.state_keys(name) if key in theirs]
        for key in keys:
            yield _difference(a, b, name, key, on_bytes)


def _difference(
    a: SavedEngine, b: SavedEngine, name: str, key: str, on_bytes: Callable[[int], None] | None
) -> WeightDifference:
    numel = math.prod(a.place(name).shape)
    squares_a = squares_b = squares = largest = 0.0
    num_differing = 0
    for begin in range(0, numel, _PIECE_NUMEL):
        left = torch.empty(min(_PIECE_NUMEL, numel - begin), dtype=torch.float64)
        right = torch.empty_like(left)
        a.copy(name, key, begin, left)
        b.copy(name, key, begin, right)
        squares_a += float(left.square().sum())
        squares_b += float(right.square().sum())
        is_other = (left != right) & ~(left.isnan() & right.isnan())
        count = int(is_other.sum())
        if count:
            num_differing += count
            difference = torch.where(is_other, left - right, 0.0)
            squares += float(difference.square().sum())
            highest = float(difference.abs().max())
            largest = highest if math.isnan(highest) or highest > largest else largest
        if on_bytes is not None:
            on_bytes(left.numel() * 2 * left.element_size())
    return WeightDifference(
        name=name,
        key=key,
        numel=numel,
        num_differing=num_differing,
        norm_a=math.sqrt(squares_a),
        norm_b=math.sqrt(squares_b),
        norm_difference=math.sqrt(squares),
        max_difference=largest,
    )
