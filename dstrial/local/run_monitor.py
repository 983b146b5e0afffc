"""Poll a run directory for progress and metrics, from outside the run's ranks."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

from dstrial.errors import DstrialError
from dstrial.local.json_files import JsonLinesTail, metric_number, read_json, read_json_lines
from dstrial.local.run_directory import RunDirectory

_COUNTERS_AND_SPEEDS = ("batches_per_second", "samples_per_second", "batches", "epochs")


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """One line of ``metrics.jsonl`` with its numeric metrics, NaN included."""

    group: str
    steps_completed: int
    metrics: Mapping[str, float]


@dataclasses.dataclass(frozen=True, slots=True)
class RunView:
    """Progress of a run at one moment; None means unknown."""

    batches_trained: int | None = None
    batches_total: int | None = None
    new_reports: tuple[Report, ...] = ()


class RunMonitor:
    """Polls the files of a run's current attempt.

    ``since`` is the attempt's start time, ISO 8601 in UTC; earlier reports are left out.
    """

    def __init__(self, run_directory: RunDirectory, *, since: str) -> None:
        self._run_directory = run_directory
        self._since = since
        self._returned_until = ""  # time of the newest report that `poll` has returned
        self._tail = JsonLinesTail(run_directory.metrics_path)
        self._view = RunView()

    def poll(self) -> RunView:
        """Return the run's progress; ``new_reports`` has the reports since the last call."""
        reports: list[Report] = []
        for row in self._tail.poll():
            # System metrics have no batch. A resume replaces the file; `poll` then returns earlier rows again.
            if (
                row["steps_completed"] is not None
                and row["time"] >= self._since
                and row["time"] > self._returned_until
            ):
                self._returned_until = row["time"]
                reports.append(to_report(str(row["group"]), int(row["steps_completed"]), row["metrics"]))
        trained, total = self._view.batches_trained or 0, self._view.batches_total
        with contextlib.suppress(DstrialError):
            progress = read_json(self._run_directory.progress_path) or {}
            if progress.get("time", "") >= self._since and "batches_trained" in progress:
                trained, total = (
                    max(int(progress["batches_trained"]), trained),
                    int(progress["batches_total"]),
                )
        # Reports may be ahead of the progress file.
        trained = max([trained, *(one.steps_completed for one in reports if one.group == "training")])
        self._view = RunView(trained or None, total, tuple(reports))
        return self._view


def to_report(group: str, steps_completed: int, metrics: Mapping[str, Any]) -> Report:
    """Return a report with the metrics that are numbers, NaN included."""
    numbers = {name: metric_number(value) for name, value in metrics.items()}
    return Report(
        group, steps_completed, {name: value for name, value in numbers.items() if value is not None}
    )


def named_metric(report: Report, preferred: str | None) -> tuple[str, float] | None:
    """Return (name, value) of the metric to show for a report; None if it has none.

    The metric is ``preferred``, else ``loss``, else the first that is neither a counter nor a speed.
    """
    for name in (preferred, "loss"):
        if name is not None and name in report.metrics:
            return name, report.metrics[name]
    return next(
        ((name, value) for name, value in report.metrics.items() if name not in _COUNTERS_AND_SPEEDS), None
    )


def number(value: float) -> str:
    """Format a metric as text with four significant digits."""
    return f"{value:.4g}"


def report_line(report: Report, batches_total: int | None, metric: str | None) -> str:
    """Format a report, for example ``batch 100/1000  loss 0.52  1834 samples/s``.

    ``metric`` is the validation metric to show; None for a default. ``batches_total`` is None if the length is unknown.
    """
    total = "" if batches_total is None else f"/{batches_total}"
    place = f"batch {report.steps_completed}{total}"
    shown = named_metric(report, metric if report.group == "validation" else "loss")
    parts = [place] if report.group == "training" else [f"{place}  {report.group}"]
    if shown is not None:
        parts.append(f"{shown[0]} {number(shown[1])}")
    speed = report.metrics.get("samples_per_second")
    if report.group == "training" and speed is not None:
        parts.append(f"{number(speed)} samples/s")
    return "  ".join(parts)


def read_validations(run_directory: RunDirectory, metric: str | None) -> dict[int, float]:
    """Return a run's validations: ``steps_completed`` -> newest value of ``metric``.

    NaN is included. Validations without ``metric`` are left out; {} if ``metric`` is None.
    """
    values: dict[int, float] = {}
    for row in read_json_lines(run_directory.metrics_path, containing=b'"group": "validation"'):
        value = metric_number(row["metrics"].get(metric)) if row["group"] == "validation" else None
        if value is not None:
            values[int(row["steps_completed"])] = value
    return values
