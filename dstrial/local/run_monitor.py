"""Poll a run directory for progress and metrics, from outside the run's ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from dstrial.errors import DstrialError
from dstrial.local.json_files import JsonLinesTail, metric_number, read_json, read_json_lines
from dstrial.local.run_directory import RunDirectory

_NEVER_THE_LOSS = ("batches_per_second", "samples_per_second", "batches", "epochs")


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """One line of ``metrics.jsonl`` with its numeric metrics, NaN included."""

    group: str
    steps_completed: int
    metrics: Mapping[str, float]


@dataclasses.dataclass(frozen=True, slots=True)
class RunView:
    """Progress and newest metrics of a run at one moment; None means unknown."""

    batches_trained: int | None = None
    batches_total: int | None = None
    loss: tuple[str, float] | None = None  # name and value of the newest training loss
    validation: tuple[str, float] | None = None  # name and value of the searcher metric
    samples_per_second: float | None = None  # over all replicas
    new_reports: tuple[Report, ...] = ()


class RunMonitor:
    """Polls the files of a run's current attempt.

    ``since`` is the attempt's start time, ISO 8601 in UTC; earlier reports are left out.
    """

    def __init__(self, run_directory: RunDirectory, *, metric: str | None, since: str) -> None:
        self._run_directory = run_directory
        self._metric = metric
        self._since = since
        self._told_until = ""
        self._tail = JsonLinesTail(run_directory.metrics_path)
        self._view = RunView()

    @property
    def has_begun(self) -> bool:
        """Whether this attempt has trained a batch, by its reports or progress."""
        return bool(self._view.batches_trained)

    def poll(self) -> RunView:
        """Return the current view; ``new_reports`` has the reports since the last call."""
        _, rows = self._tail.poll()
        new_reports: list[Report] = []
        for row in rows:
            if row["steps_completed"] is None:
                continue  # system metrics of the machine
            # A resume replaces the file; `poll` then returns earlier rows again.
            if row["time"] >= self._since and row["time"] > self._told_until:
                self._told_until = row["time"]
                new_reports.append(to_report(str(row["group"]), int(row["steps_completed"]), row["metrics"]))
        batches_trained, batches_total = self._progress()
        self._view = dataclasses.replace(
            self._view,
            batches_trained=batches_trained,
            batches_total=batches_total,
            new_reports=tuple(new_reports),
        )
        for report in new_reports:
            self._view = self._with(self._view, report)
        return self._view

    def _progress(self) -> tuple[int | None, int | None]:
        # Reports may be ahead of the progress file.
        known = self._view.batches_trained, self._view.batches_total
        try:
            progress = read_json(self._run_directory.progress_path) or {}
        except DstrialError:
            return known
        if progress.get("time", "") < self._since or "batches_trained" not in progress:
            return known
        return max(int(progress["batches_trained"]), known[0] or 0), int(progress["batches_total"])

    def _with(self, view: RunView, report: Report) -> RunView:
        if report.group == "validation":
            named = named_metric(report, self._metric)
            return dataclasses.replace(view, validation=named or view.validation)
        if report.group == "training":
            return dataclasses.replace(
                view,
                batches_trained=max(report.steps_completed, view.batches_trained or 0),
                loss=named_metric(report, "loss") or view.loss,
                samples_per_second=report.metrics.get("samples_per_second", view.samples_per_second),
            )
        return view


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
        ((name, value) for name, value in report.metrics.items() if name not in _NEVER_THE_LOSS), None
    )


def number(value: float) -> str:
    """Format a metric with four significant digits."""
    return f"{value:.4g}"


def report_line(report: Report, batches_total: int | None, metric: str | None) -> str:
    """Format a report, for example ``batch 100/1000  loss 0.52  1834 samples/s``.

    ``metric`` is the validation metric to show; ``batches_total`` is None if the length is unknown.
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
    """Return ``steps_completed`` -> newest value of ``metric``, NaN included."""
    values: dict[int, float] = {}
    for row in read_json_lines(run_directory.metrics_path):
        value = metric_number(row["metrics"].get(metric)) if row["group"] == "validation" else None
        if value is not None:
            values[int(row["steps_completed"])] = value
    return values
