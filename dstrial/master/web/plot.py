"""A line plot as SVG; pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

_WIDTH, _HEIGHT = 420, 180
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 10, 24
_MAX_POINTS = 400


@dataclasses.dataclass(frozen=True, slots=True)
class Plot:
    """A plot with its axes, in pixels.

    Attributes:
        width: of the whole.
        height: of the whole.
        points: ``x,y x,y …`` of the line.
        dots: the same points, each with a text to show.
        y_labels: (y, text) of the highest and the lowest value.
        x_labels: (x, text) of the first and the last batch.
        left: where the y axis is.
        bottom: where the x axis is.
    """

    width: int
    height: int
    points: str
    dots: tuple[tuple[float, float, str], ...]
    y_labels: tuple[tuple[float, str], ...]
    x_labels: tuple[tuple[float, str], ...]
    left: int = _LEFT
    bottom: int = _HEIGHT - _BOTTOM


def line_plot(series: Sequence[tuple[int, float]]) -> Plot | None:
    """Return the plot of a metric over batches; None without a finite value.

    Args:
        series: batches and value, in the order of batches. Of a long one every n-th is drawn, and the last.
    """
    finite = [(batch, value) for batch, value in series if math.isfinite(value)]
    if not finite:
        return None
    step = -(-len(finite) // _MAX_POINTS)
    drawn = finite[::step] if (len(finite) - 1) % step == 0 else [*finite[::step], finite[-1]]
    low, high = min(value for _, value in drawn), max(value for _, value in drawn)
    first, last = drawn[0][0], drawn[-1][0]
    bottom = _HEIGHT - _BOTTOM

    def x_of(batch: int) -> float:
        return round(_LEFT + (batch - first) / ((last - first) or 1) * (_WIDTH - _LEFT - _RIGHT), 1)

    def y_of(value: float) -> float:
        return round(bottom - (value - low) / ((high - low) or 1) * (bottom - _TOP), 1)

    dots = tuple((x_of(batch), y_of(value), f"batch {batch}: {value:.5g}") for batch, value in drawn)
    y_labels = (
        ((y_of(high), f"{high:.4g}"),)
        if high == low
        else ((y_of(high), f"{high:.4g}"), (y_of(low), f"{low:.4g}"))
    )
    x_labels = (
        ((x_of(first), str(first)),)
        if first == last
        else ((x_of(first), str(first)), (x_of(last), str(last)))
    )
    points = " ".join(f"{x},{y}" for x, y, _ in dots)
    return Plot(_WIDTH, _HEIGHT, points, dots, y_labels, x_labels)
