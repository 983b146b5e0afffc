"""Exchange metrics and stop requests between ranks; report the reduced metrics."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from determined import util

from dstrial.local.run_directory import TELEMETRY_GROUP
from dstrial.loop import sync_point
from dstrial.loop.background_save import SaveStatus
from dstrial.loop.boundaries import asks_for_checkpoint
from dstrial.loop.checkpoint_saver import CheckpointSaver
from dstrial.loop.metric_sinks import MetricSink, MetricSinks, ReportWriter
from dstrial.loop.metrics import MetricTotals, as_numpy, combine, copied
from dstrial.loop.non_finite import NonFiniteGuard, StepCounts
from dstrial.loop.run_state import RunState
from dstrial.loop.sync_point import StopReason, SyncPoints
from dstrial.ranks.control_channel import timeout_from_environ
from dstrial.ranks.heartbeat import Phase, heartbeat
from dstrial.telemetry.instruments import Instruments, TelemetryReports
from dstrial.telemetry.samples import RankSample
from dstrial.trial.context import DeepSpeedTrialContext
from dstrial.trial.determined_errors import SearcherMetricError

logger = logging.getLogger("dstrial.loop")


@dataclasses.dataclass(frozen=True, slots=True)
class _Payload:
    """The values that one rank sends to all others at a sync point.

    Attributes:
        totals: metrics of this rank; None without a report, or if this rank reports no metrics.
        counts: optimizer steps of every engine; empty without a report.
        save: state of the background save; None without one.
        failure: why this rank could not write its reports; None if it could.
        sample: this rank's telemetry; None without a report or telemetry.
    """

    totals: MetricTotals | None
    counts: list[StepCounts]
    save: SaveStatus | None
    failure: str | None
    sample: RankSample | None


class ReportExchange:
    """Exchanges metrics and stop requests between ranks; reports the averages.

    Args:
        sync_points: schedule of the exchanges.
        saver: the checkpoint saver; each exchange also finishes a background save that has ended on all ranks.
        sinks: receivers of metrics besides Determined's Core API and TensorBoard.
        instruments: measure this rank's telemetry; None on all ranks if telemetry is off.

    Attributes:
        writer: the thread that writes reports.
        guard: checks the losses and steps of each report; None for no checks.
        batches_total: length of the run in batches; None if unknown.
    """

    def __init__(
        self,
        state: RunState,
        sync_points: SyncPoints,
        saver: CheckpointSaver,
        sinks: Sequence[MetricSink],
        instruments: Instruments | None = None,
    ) -> None:
        self._context = state.context
        self._runtime = state.runtime
        self._core = self._runtime.core
        self._distributed = state.context.distributed
        self._is_chief = self._runtime.is_chief
        self._callbacks = state.callbacks
        self._progress = state.progress
        self._window = state.window
        self._sync_points = sync_points
        self._saver = saver
        self._sinks = MetricSinks(state.context, sinks)
        self._instruments = instruments
        self._telemetry: TelemetryReports | None = None
        self.writer = ReportWriter(deadline_s=timeout_from_environ())
        self.guard: NonFiniteGuard | None = None
        self.batches_total: int | None = None
        self._count_records: Callable[[int, int], int] = lambda _start, _end: 0
        self._window_seconds = 0.0
        self._window_start = 0
        self._mark_s = 0.0
        self._has_reported = False

    # ---- run -----------------------------------------------------------------------------------------

    def restore(self, loop_state: Mapping[str, Any]) -> None:
        self._window_seconds = float(loop_state.get("window_seconds", 0.0))
        self._window_start = int(loop_state.get("window_start", self._progress.batches_trained))

    def state(self) -> dict[str, Any]:
        return {"window_seconds": self._window_seconds, "window_start": self._window_start}

    def open(
        self,
        stack: contextlib.ExitStack,
        count_records: Callable[[int, int], int],
        batches_total: int | None,
    ) -> None:
        """Open the metric sinks on rank 0; ``stack`` closes sinks and writer thread.

        ``count_records(first, end)`` returns the number of records, of all replicas, in batches ``first`` to ``end - 1``.
        """
        self._count_records, self.batches_total = count_records, batches_total
        stack.callback(self.writer.close)
        if not self._is_chief:
            return
        stack.callback(self.writer.call, self._sinks.close)
        self.writer.call(self._sinks.open)
        if self._instruments is not None:
            self._telemetry = TelemetryReports(
                self._record_telemetry, self._keep_telemetry, self._instruments.peak_flops_per_s
            )
            stack.callback(self.writer.submit, self._telemetry.keep)

    def start_clock(self) -> None:
        self._mark_s = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the last call of ``start_clock``, which ``exchange`` also calls."""
        return time.monotonic() - self._mark_s

    def submit_progress(self) -> None:
        kept, total = self._runtime.kept_reports, self.batches_total
        if self._is_chief and kept is not None and total is not None:
            self.writer.submit(functools.partial(kept.report_batches, self._progress.batches_trained, total))

    def upload(self) -> None:
        self.writer.submit(self._sinks.upload)

    def require_written(self) -> None:
        """Wait until all reports are written; raise an error if any rank failed to write.

        Ranks: all, collectively.
        """
        self.writer.flush()
        self._raise_unwritten(self._distributed.allgather(self.writer.failure))

    # ---- exchange ------------------------------------------------------------------------------------

    @property
    def has_unreported(self) -> bool:
        return self._progress.batches_trained > self._window_start

    @property
    def _training_reducers(self) -> list[Any]:
        return [wrapped for wrapped in self._runtime.wrapped_reducers if wrapped.for_training]

    def exchange(self, *, reports: bool) -> StopReason | None:
        """Exchange payloads and stop requests; return the reason to stop, or None.

        If ``reports`` is true, the metrics of all ranks are also combined and reported.

        Raises:
            NonFiniteError: losses or steps fail the checks of ``guard``.
            CheckpointError: a background save has failed.
            Exception: a report could not be written.

        Ranks: all, collectively.
        """
        trained_s, batches = self.elapsed_s, self._progress.batches_trained
        self._window_seconds += trained_s
        if self._instruments is not None:
            self._instruments.trained(trained_s)
        result = self._sync_points.agree(batches, self._payload(batches, reports=reports))
        payloads: list[_Payload] = result.payloads
        failures = [payload.failure for payload in payloads]
        if not any(failures):
            self._saver.settle([payload.save for payload in payloads])
        start, counts = self._window_start, payloads[0].counts
        if reports:
            averages = combine([payload.totals for payload in payloads], self._window.where)
            self._report(dict(averages), batches)
            self._report_telemetry([payload.sample for payload in payloads], batches, counts)
        self._raise_unwritten(failures)
        if reports and self.guard is not None:
            taken, skipped = sum_steps(counts)
            if skipped and self._is_chief and (kept := self._runtime.kept_reports) is not None:
                self.writer.submit(functools.partial(kept.note_steps, taken, skipped))
            self.guard.judge(
                [payload.totals.finite for payload in payloads if payload.totals is not None],
                averages,
                counts,
                start,
                is_last=self.batches_total is not None and batches >= self.batches_total,
            )
        self.submit_progress()
        self.start_clock()
        return result.stop

    def _payload(self, batches: int, *, reports: bool) -> _Payload:
        has_totals = reports and self._runtime.mpu.should_report_metrics and len(self._window)
        measures = reports and self._instruments is not None
        return _Payload(
            self._window.totals() if has_totals else None,
            step_counts(self._context) if reports else [],
            self._saver.status(),
            self.writer.failure,
            self._instruments.sample(batches).wait() if measures and self._instruments is not None else None,
        )

    # ---- report --------------------------------------------------------------------------------------

    def _report(self, averages: dict[str, Any], batches: int) -> None:
        if self._training_reducers:
            reduced = self._context.reduce_metrics(for_training=True)
            averages.update(as_numpy(reduced))
        if not self._callbacks.is_empty:
            with heartbeat().during(Phase.CALLBACK, batches):
                self._callbacks.call(
                    "on_training_workload_end",
                    avg_metrics=dict(averages),
                    batch_metrics=self._window.batches(),
                )
        if self._is_chief:
            metrics, start = dict(averages), self._window_start
            seconds = max(self._window_seconds, 1e-9)
            metrics.setdefault("batches_per_second", (batches - start) / seconds)
            metrics.setdefault("samples_per_second", self._count_records(start, batches) / seconds)
            self.submit_training(batches, metrics)
            if not self._has_reported:
                self.writer.flush()  # the first report imports TensorBoard, during which user code should not run
            self._has_reported = True
        if self._sinks.is_upload_due():
            self.upload()
        self._window.reset()
        for wrapped in self._training_reducers:
            wrapped.reset()
        self._window_seconds = 0.0
        self._window_start = batches

    def submit_training(self, batches: int, metrics: Mapping[str, Any]) -> None:
        """Queue a report of training metrics for the writer thread. Ranks: rank 0."""
        # Copy the values, because user code may change them before they are written, for example a reducer's arrays.
        own = {name: copied(value) for name, value in metrics.items()}
        self.writer.submit(functools.partial(self._write_training, batches, own))

    def _write_training(self, batches: int, metrics: Mapping[str, Any]) -> None:
        self._core.train.report_training_metrics(steps_completed=batches, metrics=dict(metrics))
        if self.batches_total is not None:
            self._core.train.report_progress(min(batches / self.batches_total, 1.0))
        self._sinks.report("training", batches, metrics)

    def report_validation(
        self,
        metrics: Mapping[str, Any],
        *,
        epochs: int,
        policy: Literal["best", "all", "none"],
        searcher_metric: str | None,
        smaller_is_better: bool,
    ) -> bool:
        """Report validation metrics; return whether ``policy`` wants a checkpoint now.

        Raises:
            SearcherMetricError: the searcher's metric is missing or not a number.

        Ranks: all, collectively.
        """
        _require_searcher_metric(metrics, searcher_metric)
        batches = self._progress.batches_trained

        def write() -> bool:
            self.writer.flush()
            if (failed := self.writer.take_error()) is not None:
                raise failed
            train = self._core.train
            best_before = train.get_experiment_best_validation() if policy == "best" else None
            self.writer.call(lambda: self._sinks.report("validation", batches, metrics))
            reported = dict(metrics)
            reported.setdefault("batches", batches)
            reported.setdefault("epochs", epochs)
            train.report_validation_metrics(steps_completed=batches, metrics=reported)
            now = reported.get(str(searcher_metric))
            return asks_for_checkpoint(policy, now, best_before, smaller_is_better=smaller_is_better)

        try:
            saves = sync_point.result_of_chief(self._distributed, "the report of a validation", write)
        finally:
            self.upload()
        self._progress.last_validation = batches
        return saves

    def _report_telemetry(
        self, samples: Sequence[RankSample | None], batches: int, counts: Sequence[StepCounts]
    ) -> None:
        found = [sample for sample in samples if sample is not None]
        if self._telemetry is not None and len(found) == len(samples):
            num_records = self._count_records(batches - found[0].num_batches, batches)
            _, skipped = sum_steps(counts)
            self.writer.submit(functools.partial(self._telemetry.write, found, batches, num_records, skipped))

    def _record_telemetry(self, batches: int, metrics: dict[str, Any]) -> None:
        self._core.train.report_metrics(TELEMETRY_GROUP, steps_completed=batches, metrics=metrics)
        self._sinks.report(TELEMETRY_GROUP, batches, metrics)

    def _keep_telemetry(self, totals: Mapping[str, Any]) -> None:
        if (kept := self._runtime.kept_reports) is not None:
            kept.note_telemetry(totals)

    def _raise_unwritten(self, failures: Sequence[str | None]) -> None:
        """Raise an error if any rank has failed to write a report.

        ``failures`` has for each rank the failure as text, or None.
        """
        if not any(failures):
            return
        error = self.writer.take_error()
        if error is not None:
            raise error
        failed = [(rank, text) for rank, text in enumerate(failures) if text is not None]
        raise sync_point.peer_failed("the writing of a report", failed)


def _require_searcher_metric(metrics: Mapping[str, Any], name: str | None) -> None:
    if name is None or name in ("batches", "epochs"):  # every validation report has these two
        return
    if name not in metrics:
        raise SearcherMetricError(
            f"the searcher's metric is {name!r}, but validation returned {sorted(metrics)}; expected it among "
            "them. Return it from evaluate_batch or report it, or set searcher.metric to one of them."
        )
    if not util.is_numerical_scalar(metrics[name]):
        raise SearcherMetricError(
            f"the searcher's metric {name!r} is {metrics[name]!r}; expected one number. Return a scalar."
        )


def step_counts(context: DeepSpeedTrialContext) -> list[StepCounts]:
    """Return the step counts of each engine with an optimizer, in order of wrapping."""
    return [StepCounts.of(engine) for engine in context.models if engine.optimizer is not None]


def sum_steps(counts: Sequence[StepCounts]) -> tuple[int, int]:
    """Return (optimizer steps, skipped steps) of all engines.

    The first number includes skipped steps.
    """
    return sum(count.num_steps for count in counts), sum(count.num_skipped for count in counts)
