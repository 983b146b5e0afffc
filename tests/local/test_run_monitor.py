"""Progress and reports that RunMonitor reads from a run directory."""

from __future__ import annotations

import math

import pytest

from dstrial.local.json_files import append_json_line, write_json_atomically
from dstrial.local.run_directory import RunDirectory
from dstrial.local.run_monitor import Report, RunMonitor, RunView, named_metric, read_validations


def report(run_directory: RunDirectory, group: str, steps: int, metrics: dict[str, float], time: str) -> None:
    row = {"group": group, "steps_completed": steps, "metrics": metrics, "time": time}
    append_json_line(run_directory.metrics_path, row)


def test_poll_returns_progress_and_new_reports(run_directory: RunDirectory) -> None:
    monitor = RunMonitor(run_directory, since="2026")
    assert monitor.poll() == RunView()
    progress = {"batches_trained": 12, "batches_total": 100, "time": "2027-01"}
    write_json_atomically(run_directory.progress_path, progress)
    report(run_directory, "training", 10, {"loss": math.nan}, "2027-01")
    report(run_directory, "validation", 10, {"accuracy": 0.9}, "2027-02")
    row = {"group": "cpu", "steps_completed": None, "metrics": {"node": {"cpu_util_simple": 1.0}}}
    append_json_line(run_directory.metrics_path, {**row, "time": "2027-09"})
    view = monitor.poll()
    assert (view.batches_trained, view.batches_total) == (12, 100)
    assert [(entry.group, entry.steps_completed) for entry in view.new_reports] == [
        ("training", 10),
        ("validation", 10),
    ]
    assert monitor.poll() == RunView(12, 100)


def test_poll_ignores_reports_of_earlier_attempts(run_directory: RunDirectory) -> None:
    write_json_atomically(
        run_directory.progress_path, {"batches_trained": 50, "batches_total": 100, "time": "2026-01"}
    )
    report(run_directory, "training", 10, {"loss": 1.0}, "2026-01")
    monitor = RunMonitor(run_directory, since="2026-02")
    assert monitor.poll().new_reports == ()
    assert monitor.poll().batches_trained is None
    report(run_directory, "training", 20, {"loss": 0.5}, "2026-03")
    assert [entry.steps_completed for entry in monitor.poll().new_reports] == [20]


def test_throttled_progress_never_falls_behind_reports(run_directory: RunDirectory) -> None:
    monitor = RunMonitor(run_directory, since="2026")
    progress = {"batches_trained": 30, "batches_total": 100, "time": "2027-01"}
    write_json_atomically(run_directory.progress_path, progress)
    report(run_directory, "training", 40, {"loss": 1.0}, "2027-01")
    assert [monitor.poll().batches_trained for _ in range(3)] == [40, 40, 40]
    write_json_atomically(run_directory.progress_path, {**progress, "batches_trained": 45})
    assert monitor.poll().batches_trained == 45


def test_poll_rewritten_file_returns_only_new_reports(run_directory: RunDirectory) -> None:
    monitor = RunMonitor(run_directory, since="2026-01")
    report(run_directory, "training", 10, {"loss": 1.0}, "2026-02")
    assert len(monitor.poll().new_reports) == 1
    copy = run_directory.path / "copy"
    copy.write_bytes(run_directory.metrics_path.read_bytes())
    copy.replace(run_directory.metrics_path)
    report(run_directory, "training", 20, {"loss": 0.5}, "2026-03")
    assert [entry.steps_completed for entry in monitor.poll().new_reports] == [20]


@pytest.mark.parametrize(
    ("metrics", "preferred", "expected"),
    [
        ({"a": 1.0, "loss": 2.0}, "a", ("a", 1.0)),
        ({"a": 1.0, "loss": 2.0}, None, ("loss", 2.0)),
        ({"samples_per_second": 3.0, "generator_loss": 1.0}, "loss", ("generator_loss", 1.0)),
        ({"batches": 3.0}, "loss", None),
    ],
)
def test_named_metric_prefers_given_name_then_loss(
    metrics: dict[str, float], preferred: str | None, expected: tuple[str, float] | None
) -> None:
    assert named_metric(Report("training", 1, metrics), preferred) == expected


def test_read_validations_keeps_last_report_per_batch(run_directory: RunDirectory) -> None:
    report(run_directory, "validation", 10, {"accuracy": 0.1}, "2026")
    report(run_directory, "validation", 10, {"accuracy": 0.2}, "2026")
    report(run_directory, "validation", 20, {"other": 0.2}, "2026")
    report(run_directory, "training", 30, {"accuracy": 0.2}, "2026")
    assert read_validations(run_directory, "accuracy") == {10: 0.2}
