"""Charts as SVG text, drawn from numbers; no library, no script, no network. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

Scale = Callable[[float], float]

WIDTH, HEIGHT = 640, 380
_LEFT, _RIGHT, _TOP, _BOTTOM = 66, 20, 16, 50

PARTS = {
    "compute": "#2f6db3",
    "forward": "#2f6db3",
    "backward": "#5b95d1",
    "exposed communication": "#c8553d",
    "host copies": "#8a5fb0",
    "optimizer": "#d9a441",
    "optimizer step": "#d9a441",
    "idle": "#b8bec6",
    "between": "#b8bec6",
}
"""Colour of each part of a step's time."""


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """One mark of a scatter chart."""

    x: float
    y: float
    kind: str  # class of the mark: ``best``, ``own`` or ``other``
    title: str  # shown when pointed at
    label: str = ""  # written beside it


def ticks(low: float, high: float) -> list[float]:
    """Return round values that cover a range: steps of 1, 2 or 5 times a power of ten."""
    if not high > low:
        return [low]
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(size * power for size in (1, 2, 5, 10) if size * power >= rough * 0.999)
    first = math.floor(low / step)
    last = math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]


def scatter(
    points: Sequence[Point],
    *,
    x_label: str,
    y_label: str,
    line: Sequence[tuple[float, float]] = (),
    limit_x: tuple[float, str] | None = None,
    is_square: bool = False,
) -> str:
    """Return marks over two axes that begin at zero where the values allow it.

    ``line`` lies behind the marks; ``limit_x`` is a vertical line and its words; ``is_square`` draws a diagonal.
    """
    if not points:
        return ""
    x_ticks = _axis([point.x for point in points] + ([limit_x[0]] if limit_x else []))
    y_ticks = _axis([point.y for point in points])
    if is_square:
        x_ticks = y_ticks = _axis([value for point in points for value in (point.x, point.y)])

    def x(value: float) -> float:
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * _part(value, x_ticks)

    def y(value: float) -> float:
        return HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * _part(value, y_ticks)

    marks = [_grid(x_ticks, y_ticks, x, y, x_label, y_label)]
    if is_square:
        marks.append(
            f'<line class="diagonal" x1="{x(x_ticks[0]):.1f}" y1="{y(y_ticks[0]):.1f}" '
            f'x2="{x(x_ticks[-1]):.1f}" y2="{y(y_ticks[-1]):.1f}"/>'
        )
    if limit_x is not None:
        at = x(limit_x[0])
        marks.append(
            f'<line class="limit" x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}"/>'
            f'<text class="limit" x="{at - 5:.1f}" y="{HEIGHT - _BOTTOM - 8}" text-anchor="end">{escape(limit_x[1])}</text>'
        )
    if len(line) > 1:
        vertices = " ".join(f"{x(one):.1f},{y(other):.1f}" for one, other in line)
        marks.append(f'<polyline class="front" points="{vertices}"/>')
    order = {"other": 0, "own": 1, "best": 2}
    for point in sorted(points, key=lambda each: order.get(each.kind, 0)):
        marks += _point_marks(point, x(point.x), y(point.y))
    return _svg(WIDTH, HEIGHT, marks)


def _point_marks(point: Point, x: float, y: float) -> list[str]:
    radius = 4 if point.kind == "other" else 6
    marks = [
        f'<circle class="{point.kind}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}">'
        f"<title>{escape(point.title)}</title></circle>"
    ]
    if point.label:
        anchor, shift = ("end", -10) if x > WIDTH * 0.7 else ("start", 10)
        marks.append(
            f'<text class="label" x="{x + shift:.1f}" y="{y - 8:.1f}" '
            f'text-anchor="{anchor}">{escape(point.label)}</text>'
        )
    return marks


def stacks(rows: Sequence[tuple[str, Mapping[str, float]]], *, unit: str) -> str:
    """Return one horizontal bar per row, made of named parts, on a common scale."""
    rows = [row for row in rows if sum(row[1].values()) > 0]
    if not rows:
        return ""
    top, bar, gap = 8, 26, 14
    longest = max(sum(parts.values()) for _, parts in rows)
    scale = ticks(0, longest)
    left = 130
    height = top + len(rows) * (bar + gap) + 62

    def x(value: float) -> float:
        return left + (WIDTH - left - _RIGHT) * value / scale[-1]

    marks = []
    bottom = top + len(rows) * (bar + gap)
    for value in scale:
        marks.append(
            f'<line class="grid" x1="{x(value):.1f}" x2="{x(value):.1f}" y1="{top}" y2="{bottom}"/>'
            f'<text x="{x(value):.1f}" y="{bottom + 14}" text-anchor="middle">{value:.3g}</text>'
        )
    marks.append(f'<text x="{WIDTH - _RIGHT}" y="{bottom + 30}" text-anchor="end">{escape(unit)}</text>')
    for idx, (name, parts) in enumerate(rows):
        y, at = top + idx * (bar + gap) + gap / 2, 0.0
        marks.append(
            f'<text x="{left - 8}" y="{y + bar / 2 + 4:.1f}" text-anchor="end">{escape(name)}</text>'
        )
        for part, value in parts.items():
            title = f"{part}: {value:.4g} {unit}, {value / sum(parts.values()):.0%}"
            marks.append(
                f'<rect x="{x(at):.1f}" y="{y:.1f}" width="{max(x(at + value) - x(at), 0):.1f}" height="{bar}" '
                f'fill="{PARTS.get(part, "#888888")}"><title>{escape(title)}</title></rect>'
            )
            if x(at + value) - x(at) > 34:
                marks.append(
                    f'<text class="inside" x="{(x(at) + x(at + value)) / 2:.1f}" y="{y + bar / 2 + 4:.1f}" '
                    f'text-anchor="middle">{value / sum(parts.values()):.0%}</text>'
                )
            at += value
    place = 0.0
    names = list(dict.fromkeys(part for _, parts in rows for part in parts))
    for part in names:
        marks.append(
            f'<rect x="{place:.0f}" y="{height - 16}" width="11" height="11" fill="{PARTS.get(part, "#888888")}"/>'
            f'<text x="{place + 16:.0f}" y="{height - 6}">{escape(part)}</text>'
        )
        place += 32 + 6.4 * len(part)
    return _svg(WIDTH, height, marks)


def _axis(values: Sequence[float]) -> list[float]:
    low, high = min(values), max(values)
    # Zero is left out where it would press everything into a corner.
    return ticks(
        0 if low < 0.6 * high else low - (high - low) * 0.1, high if high > low else low * 1.1 + 1e-9
    )


def _part(value: float, scale: Sequence[float]) -> float:
    span = scale[-1] - scale[0]
    return (value - scale[0]) / span if span else 0.5


def _grid(
    x_ticks: Sequence[float], y_ticks: Sequence[float], x: Scale, y: Scale, x_label: str, y_label: str
) -> str:
    marks = []
    for value in x_ticks:
        marks.append(
            f'<line class="grid" x1="{x(value):.1f}" x2="{x(value):.1f}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}"/>'
            f'<text x="{x(value):.1f}" y="{HEIGHT - _BOTTOM + 16}" text-anchor="middle">{value:.4g}</text>'
        )
    for value in y_ticks:
        marks.append(
            f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>'
            f'<text x="{_LEFT - 7}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.4g}</text>'
        )
    middle = (HEIGHT - _TOP - _BOTTOM) / 2 + _TOP
    marks.append(
        f'<text x="{(WIDTH + _LEFT) / 2}" y="{HEIGHT - 10}" text-anchor="middle">{escape(x_label)}</text>'
        f'<text transform="translate(14 {middle}) rotate(-90)" text-anchor="middle">{escape(y_label)}</text>'
    )
    return "".join(marks)


def _svg(width: float, height: float, marks: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" role="img">'
        + "".join(marks)
        + "</svg>"
    )
