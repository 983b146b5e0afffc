"""Receivers (sinks) of reported metrics, and the thread that writes reports.

Writing a report can take longer than training a batch. Therefore a background thread of rank 0 (the chief) writes the reports in
order, each exactly once. If the thread fails, all ranks raise an error at their next sync point.
"""

from __future__ import annotations

import concurrent.futures
import html
import importlib
import logging
import math
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeVar

from determined import tensorboard, util

from dstrial.errors import DstrialError
from dstrial.local.run_directory import TELEMETRY_GROUP
from dstrial.local.run_monitor import Report, named_metric, number, report_line, to_report
from dstrial.trial.context import DeepSpeedTrialContext, runtime_of

logger = logging.getLogger("dstrial.loop")

T = TypeVar("T")

_UPLOAD_INTERVAL_S = 5.0  # minimum time between two uploads of TensorBoard files

# Size of a curve in a notebook, in pixels.
_CURVE_WIDTH, _CURVE_HEIGHT = 420, 140
_SHOWN_REPORTS = 8  # maximum number of reports below the curves

CAPACITY = 32  # maximum number of queued jobs; if the queue is full, the loop waits


class MetricSink(Protocol):
    """Receives reported metrics, on rank 0 (the chief) only.

    All methods are called on one background thread, one at a time. Training waits for ``open``, ``close`` and validation
    reports, and continues during training reports. If a method raises an exception, training ends on all ranks at their next
    sync point, and no further reports are written.

    A sink whose attribute ``takes_telemetry`` is true also gets reports of the group ``telemetry``.
    """

    def open(self, context: DeepSpeedTrialContext) -> None:
        """Start the sink; called once, after the checkpoint to resume from is loaded."""

    def report(
        self, group: Literal["training", "validation"], batches_trained: int, metrics: Mapping[str, Any]
    ) -> None:
        """Store one report.

        Args:
            group: ``training`` or ``validation``.
            batches_trained: finished batches of the run; a resumed run may report the same number again.
            metrics: metric name -> value over all ranks, mostly numbers; a sink must not change the mapping.
        """

    def close(self) -> None:
        """Release the sink; called once if ``open`` was called, also after an error."""


class TensorBoardSink:
    """Writes scalar metrics as TensorBoard events, unless the context disables them."""

    takes_telemetry = True

    def open(self, context: DeepSpeedTrialContext) -> None:
        self._context = context

    def report(self, group: str, batches_trained: int, metrics: Mapping[str, Any]) -> None:
        if not self._context.get_enable_tensorboard_logging():
            return
        writer = self._context.get_tensorboard_writer()
        for name, value in metrics.items():
            if not util.is_numerical_scalar(value):
                continue
            if group == TELEMETRY_GROUP:
                tag = f"Telemetry/{name}"
            elif group == "validation" and not name.startswith("val"):
                tag = f"Determined/val_{name}"
            else:
                tag = f"Determined/{name}"
            writer.add_scalar(tag, value, batches_trained)

    def close(self) -> None:
        """Do nothing, because the context closes the TensorBoard writer."""


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
        """Do nothing: the last report stays visible."""

    def _repr_html_(self) -> str:
        curves = "".join(map(self._curve, ("training", "validation")))
        lines = [
            html.escape(report_line(report, self._batches_total, self._metric))
            for report in self._reports[-_SHOWN_REPORTS:]
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
        f"{(x - left) / ((right - left) or 1) * _CURVE_WIDTH:.1f},{(high - y) / ((high - low) or 1) * _CURVE_HEIGHT:.1f}"
        for x, y in points
    )
    return (
        f'<figure style="display:inline-block;margin:4px 16px 4px 0"><figcaption>{html.escape(title)} '
        f"{number(ys[-1])} ({number(low)} to {number(high)})</figcaption>"
        f'<svg width="{_CURVE_WIDTH}" height="{_CURVE_HEIGHT}" viewBox="-2 -2 {_CURVE_WIDTH + 4} {_CURVE_HEIGHT + 4}" role="img">'
        f'<polyline points="{path}" fill="none" stroke="#1f5fd0" stroke-width="1.5"/></svg>'
        f"<div>batches {left:g} to {right:g}</div></figure>"
    )


SINKS: tuple[Callable[[], MetricSink], ...] = (TensorBoardSink,)
"""Constructors of the metric sinks that every run has besides the user's own."""


class MetricSinks:
    """Forwards calls to all sinks of a run; uploads this rank's TensorBoard files."""

    def __init__(self, context: DeepSpeedTrialContext, own: Sequence[MetricSink] = ()) -> None:
        self._context = context
        self._runtime = runtime_of(context)
        self._sinks = [*(make() for make in SINKS), *own]
        self._opened: list[MetricSink] = []
        self._uploaded_s = -_UPLOAD_INTERVAL_S

    def open(self) -> None:
        for sink in self._sinks:
            self._opened.append(sink)
            sink.open(self._context)

    def report(self, group: str, batches_trained: int, metrics: Mapping[str, Any]) -> None:
        for sink in self._opened:
            if group != TELEMETRY_GROUP or getattr(sink, "takes_telemetry", False):
                sink.report(group, batches_trained, metrics)  # type: ignore[arg-type]  # telemetry: sinks that ask for it

    def close(self) -> None:
        """Close all opened sinks, then raise the first error that occurred."""
        failure: Exception | None = None
        while self._opened:
            try:
                self._opened.pop().close()
            except Exception as error:  # noqa: BLE001  # raised below, after the other sinks are closed
                failure = failure or error
        if failure is not None:
            raise failure

    def is_upload_due(self) -> bool:
        is_early = time.monotonic() - self._uploaded_s < _UPLOAD_INTERVAL_S
        return not is_early and self._runtime.writes_tensorboard

    def upload(self) -> None:
        """Upload this rank's profiler traces and, on rank 0, the TensorBoard events."""
        if not self._runtime.writes_tensorboard:
            return
        self._uploaded_s = time.monotonic()
        if self._runtime.tensorboard_writer is not None:
            self._runtime.tensorboard_writer.flush()
        is_chief = self._runtime.is_chief
        self._runtime.core.train.upload_tensorboard_files(
            lambda path: is_chief or not path.match("*tfevents*"), tensorboard.util.get_rank_aware_path
        )


class ReportWriter:
    """Runs submitted jobs in order on a background thread.

    After a job fails, later jobs are skipped, so that no report follows a missing one.

    Args:
        deadline_s: timeout, in seconds, of waiting for queued jobs.
        capacity: maximum number of queued jobs.
    """

    def __init__(self, *, deadline_s: float, capacity: int = CAPACITY) -> None:
        self._deadline_s = deadline_s
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue(capacity)  # None ends the thread
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._is_raised = False

    def submit(self, job: Callable[[], None]) -> None:
        """Queue a job; block only while the queue is full.

        Raises:
            DstrialError: the queue is still full after ``deadline_s``.
        """

        def run_unless_failed() -> None:
            if self._error is None:
                try:
                    job()
                except BaseException as error:  # noqa: BLE001  # the loop raises the error later
                    self._error = error

        self._put(run_unless_failed)

    def call(self, job: Callable[[], T]) -> T:
        """Run a job on the thread, also after other jobs failed; return the job's result.

        An error of the job is raised here.

        Raises:
            DstrialError: the job has not finished after ``deadline_s``.
        """
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def run() -> None:
            try:
                future.set_result(job())
            except BaseException as error:  # noqa: BLE001  # raised on the calling thread
                future.set_exception(error)

        self._put(run)
        if not concurrent.futures.wait([future], self._deadline_s).done:
            raise self._unwritten()
        return future.result()

    def flush(self) -> None:
        """Wait until all queued jobs have finished, failed or been skipped.

        Raises:
            DstrialError: jobs are still queued or running after ``deadline_s``.
        """
        if self._thread is not None:
            self.call(lambda: None)

    @property
    def failure(self) -> str | None:
        """The first job failure in one line; None without failure or after ``take_error``."""
        if self._error is None or self._is_raised:
            return None
        return f"{type(self._error).__name__}: {self._error}".splitlines()[0]

    def take_error(self) -> BaseException | None:
        """Return the exception of the first report that failed; the caller must raise it.

        None if no report has failed, or if an earlier call has returned the exception.
        """
        error = None if self._is_raised else self._error
        self._is_raised = self._is_raised or error is not None
        return error

    def close(self) -> None:
        """Run the queued jobs and end the thread; log ``failure`` if there is one."""
        if self._thread is None:
            return
        try:
            self.flush()
        except DstrialError as error:
            logger.error("%s", error)  # a hanging job has no traceback
            return
        self._jobs.put(None)
        self._thread.join()
        self._thread = None
        if self.failure is not None:
            logger.error("a report could not be written: %s", self.failure, exc_info=self.take_error())

    def _put(self, job: Callable[[], None]) -> None:
        if self._thread is None:
            # A daemon thread, because a sink that hangs must not keep the process alive.
            self._thread = threading.Thread(target=self._run, name="dstrial-reports", daemon=True)
            self._thread.start()
        try:
            self._jobs.put(job, timeout=self._deadline_s)
        except queue.Full:
            raise self._unwritten() from None

    def _unwritten(self) -> DstrialError:
        return DstrialError(
            f"reports of metrics and progress are not written after {self._deadline_s:g} s; expected the record and every "
            "metric sink to take them. Look at what hangs there: a sink of your own, the master, or the disk of the run "
            "directory."
        )

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job
