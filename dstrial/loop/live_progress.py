"""Show the progress of ``Trainer.fit`` as text lines, or as curves in a notebook."""

from __future__ import annotations

import html
import importlib
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from dstrial.local.run_monitor import Report, named_metric, number, report_line, to_report
from dstrial.trial.context import DeepSpeedTrialContext

_WIDTH, _HEIGHT = 420, 140  # size of a curve, pixels
_ROWS = 8  # maximum number of reports in the table


class LiveProgress:
    """Metric sink that prints each report, or shows it in a notebook.

    Args:
        batches_total: length of the run in batches; None if the length is in epochs.
        metric: validation metric to show; None shows ``loss``, or the first metric if there is no ``loss``.

    Attributes:
        newest: newest metrics of each group (``training``, ``validation``).
    """

    def __init__(self, batches_total: int | None, metric: str | None, *, is_silent: bool) -> None:
        self._batches_total = batches_total
        self._metric = metric
        self._is_silent = is_silent
        self._reports: list[Report] = []
        self._handle: Any = None
        self.newest: dict[str, Mapping[str, Any]] = {}

    def open(self, context: DeepSpeedTrialContext) -> None:
        del context
        if not self._is_silent and _is_notebook():
            # In a notebook, the kernel has installed IPython.
            self._handle = importlib.import_module("IPython.display").display(self, display_id=True)

    def report(self, group: str, batches_trained: int, metrics: Mapping[str, Any]) -> None:
        self.newest[group] = dict(metrics)
        if self._is_silent:
            return
        report = to_report(group, batches_trained, metrics)
        if self._handle is None:
            try:
                sys.stdout.write(report_line(report, self._batches_total, self._metric) + "\n")
                sys.stdout.flush()
            except (OSError, ValueError):  # a closed output must not end training
                self._is_silent = True
        else:
            self._reports.append(report)
            self._handle.update(self)

    def close(self) -> None:
        pass

    def _repr_html_(self) -> str:
        curves = "".join(map(self._curve, ("training", "validation")))
        lines = [
            html.escape(report_line(report, self._batches_total, self._metric))
            for report in self._reports[-_ROWS:]
        ]
        return f"<div>{curves}</div><pre>{'<br>'.join(lines)}</pre>"

    def _curve(self, group: str) -> str:
        points: dict[str, list[tuple[float, float]]] = {}
        for report in self._reports:
            named = named_metric(report, self._metric if group == "validation" else "loss")
            if report.group == group and named is not None and math.isfinite(named[1]):
                points.setdefault(named[0], []).append((report.steps_completed, named[1]))
        return "".join(_svg(f"{group}: {name}", found) for name, found in points.items() if len(found) > 1)


def _is_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


def _svg(title: str, points: Sequence[tuple[float, float]]) -> str:
    """Return a curve as SVG, labelled with its first, last, lowest and highest values."""
    (left, right), ys = (points[0][0], points[-1][0]), [y for _, y in points]
    low, high = min(ys), max(ys)
    path = " ".join(
        f"{(x - left) / ((right - left) or 1) * _WIDTH:.1f},{(high - y) / ((high - low) or 1) * _HEIGHT:.1f}"
        for x, y in points
    )
    return (
        f'<figure style="display:inline-block;margin:4px 16px 4px 0"><figcaption>{html.escape(title)} '
        f"{number(ys[-1])} ({number(low)} to {number(high)})</figcaption>"
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" viewBox="-2 -2 {_WIDTH + 4} {_HEIGHT + 4}" role="img">'
        f'<polyline points="{path}" fill="none" stroke="#1f5fd0" stroke-width="1.5"/></svg>'
        f"<div>batches {left:g} to {right:g}</div></figure>"
    )
