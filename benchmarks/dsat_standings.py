"""The table and the plot of the autotuner's benchmark, from its record. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

Line = Mapping[str, Any]

_LATE = 64


def markdown(lines: Sequence[Line]) -> str:
    """Return one table per kind of batch over all cases, and one per case."""
    parts = []
    for batch in sorted({str(line["batch"]) for line in lines}):
        of_batch = [line for line in lines if line["batch"] == batch]
        surfaces = [line for line in of_batch if line["case"] != "recorded grid"]
        if surfaces:
            cases = sorted({str(line["case"]) for line in surfaces})
            seeds = len({line["seed"] for line in surfaces})
            parts.append(
                f"## Formula surfaces, {batch} global batch: {len(cases)} workloads, {seeds} seeds\n"
            )
            parts.append(_table(surfaces))
        for case in dict.fromkeys(str(line["case"]) for line in of_batch):
            parts.append(f"### {case}, {batch} global batch\n")
            parts.append(_table([line for line in of_batch if line["case"] == case]))
    return "\n".join(parts)


def _table(lines: Sequence[Line]) -> str:
    rows = [
        "| method | searches | reached 3 % | trials until then: median (p95) | device-hours until then: median "
        "| all trials: median | all device-hours: median | out of memory | final gap: mean (worst) |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for method in dict.fromkeys(str(line["method"]) for line in lines):
        mine = [line for line in lines if line["method"] == method]
        reached = [line for line in mine if line["first_close"] is not None]
        # Never counts as later than any.
        first = sorted(math.inf if line["first_close"] is None else line["first_close"] for line in mine)
        until = sorted(
            math.inf if line["first_close"] is None else line["device_s_until_close"] / 3600 for line in mine
        )
        trials = sum(line["trials"] for line in mine)
        gaps = [line["gap"] for line in mine]
        rows.append(
            f"| {method} | {len(mine)} | {len(reached) / len(mine):.0%} "
            f"| {_number(_quantile(first, 0.5))} ({_number(_quantile(first, 0.95))}) "
            f"| {_number(_quantile(until, 0.5), 2)} | {statistics.median(line['trials'] for line in mine):.0f} "
            f"| {statistics.median(line['device_s'] for line in mine) / 3600:.2f} "
            f"| {sum(line['out_of_memory'] for line in mine) / trials:.1%} "
            f"| {statistics.mean(gaps):.1%} ({max(gaps):.1%}) |"
        )
    return "\n".join(rows) + "\n"


def _quantile(ascending: Sequence[float], share: float) -> float:
    return ascending[min(math.ceil(share * len(ascending)) - 1, len(ascending) - 1)]


def _number(value: float, digits: int = 0) -> str:
    return "never" if math.isinf(value) else f"{value:.{digits}f}"


def plot(lines: Sequence[Line]) -> str:
    """Return an SVG: for every method, the share of searches that have run something within 3 % after so many trials."""
    batches = sorted({str(line["batch"]) for line in lines})
    width, height, left, top, gap = 520, 360, 60, 40, 330
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{len(batches) * (width + gap)}" height="{height + 100}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    methods = list(dict.fromkeys(str(line["method"]) for line in lines))
    for number, batch in enumerate(batches):
        x0 = left + number * (width + gap)

        def x(trial: float, x0: int = x0) -> float:
            return x0 + width * math.log2(max(trial, 1)) / math.log2(_LATE)

        def y(share: float) -> float:
            return top + height * (1 - share)

        parts.append(f'<text x="{x0}" y="{top - 14}" font-weight="bold">{batch} global batch</text>')
        for share in (0, 0.25, 0.5, 0.75, 1):
            parts.append(
                f'<line x1="{x0}" x2="{x0 + width}" y1="{y(share)}" y2="{y(share)}" stroke="#ddd"/>'
                f'<text x="{x0 - 8}" y="{y(share) + 4}" text-anchor="end">{share:.0%}</text>'
            )
        for trial in (1, 2, 4, 8, 16, 32, 64):
            parts.append(f'<text x="{x(trial)}" y="{top + height + 18}" text-anchor="middle">{trial}</text>')
        parts.append(
            f'<text x="{x0 + width / 2}" y="{top + height + 40}" text-anchor="middle">trials</text>'
            f'<text x="{x0}" y="{top + height + 62}" fill="#555">share of searches that have run a configuration '
            "within 3 % of the exhaustive optimum</text>"
        )
        ends = []
        for method in methods:
            mine = [line for line in lines if line["method"] == method and line["batch"] == batch]
            if not mine:
                continue
            firsts = sorted(line["first_close"] for line in mine if line["first_close"] is not None)
            colour = _colour(method)
            points, done = [(x(1), y(0.0))], 0
            for first in firsts:
                points.append((x(first), y(done / len(mine))))
                done += 1
                points.append((x(first), y(done / len(mine))))
            points.append((x(_LATE), y(done / len(mine))))
            path = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
            dash = ' stroke-dasharray="5 3"' if "no-gates" in method else ""
            thick = 3.5 if method == "predict" else 1.6
            parts.append(
                f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{thick}"{dash}/>'
            )
            ends.append((y(done / len(mine)), method, colour))
        below = top - 10.0
        for at, method, colour in sorted(ends):
            below = max(below + 15, at)
            parts.append(
                f'<line x1="{x0 + width}" y1="{at:.1f}" x2="{x0 + width + 18}" y2="{below:.1f}" stroke="{colour}"/>'
                f'<text x="{x0 + width + 22}" y="{below + 4:.1f}" fill="{colour}">{method}</text>'
            )
    return "\n".join([*parts, "</svg>", ""])


def _colour(method: str) -> str:
    base = method.removesuffix("-no-gates")
    return {
        "predict": "#c0392b",
        "asha": "#1f77b4",
        "binary": "#17a2a2",
        "random": "#2ca02c",
        "random-legal": "#7f7f7f",
        "optuna": "#9467bd",
        "deepspeed-grid": "#b8860b",
        "deepspeed-random": "#d4a017",
        "deepspeed-model": "#8b6508",
        "determined-asha": "#333333",
        "determined-binary": "#666666",
        "determined-random": "#999999",
    }.get(base, "#000000")
