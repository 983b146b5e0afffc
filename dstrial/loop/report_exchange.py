"""What ranks exchange at points of a run, and the report that follows.

A report's totals travel with everything else that is agreed on. If nothing follows at once, training goes on for a batch
meanwhile; the averages then go to the thread of ``dstrial.loop.report_writer``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from determined import pytorch, util

from dstrial.engine.finite_weights import StepCounts
from dstrial.loop import sync_point
from dstrial.loop.boundaries import Progress, asks_for_checkpoint
from dstrial.loop.callbacks import Callbacks
from dstrial.loop.checkpoint_saver import CheckpointSaver
from dstrial.loop.metric_sinks import MetricSinks
from dstrial.loop.metrics import AsyncTotals, MetricTotals, MetricWindow, combine
from dstrial.loop.report_writer import ReportWriter
from dstrial.loop.run_state import copied
from dstrial.loop.sync_point import StopReason, SyncPoints
from dstrial.ranks.control_channel import timeout_from_environ
from dstrial.ranks.heartbeat import Phase, heartbeat
from dstrial.telemetry.instruments import AsyncSample, Instruments
from dstrial.telemetry.reporting import TelemetryReports
from dstrial.telemetry.samples import GROUP, RankSample
from dstrial.trial.context import DeepSpeedTrialContext, runtime_of
from dstrial.trial.determined_errors import SearcherMetricError

logger = logging.getLogger("dstrial.loop")


@dataclasses.dataclass(slots=True)
class Exchange:
    """An exchange between ranks that has begun.

    Attributes:
        batches: finished batches at its beginning.
        start: the same at the report before it.
        seconds: trained between the two.
        totals: of this rank; None without a report, or if this rank reports no metrics.
        counts: optimizer steps of every engine.
        reports: whether it is for a report.
        is_deferred: whether training goes on before its end.
        is_sent: whether this rank's payload is on its way.
        sample: of this rank's instruments; None without them.
    """

    batches: int
    start: int
    seconds: float
    totals: AsyncTotals | None
    counts: list[StepCounts]
    reports: bool
    is_deferred: bool
    is_sent: bool = False
    sample: AsyncSample | None = None


Judge = Callable[[Sequence[MetricTotals | None], Mapping[str, Any], Sequence[StepCounts], Exchange], None]
"""Looks at the shares of all ranks, the averages, and the chief's steps at its own turn and at the exchange's beginning."""


class ReportExchange:
    """Has ranks agree at points of a run, and reports what they have trained.

    Args:
        on_progress: called with the finished batches and the total on the chief.
        judge: raises, on all ranks, if a report shows that training does not train.
        instruments: of this rank; None where they are switched off, on all ranks alike.
    """

    def __init__(
        self,
        context: DeepSpeedTrialContext,
        callbacks: Callbacks,
        progress: Progress,
        window: MetricWindow,
        sync_points: SyncPoints,
        saver: CheckpointSaver,
        sinks: MetricSinks,
        on_progress: Callable[[int, int], None],
        judge: Judge,
        instruments: Instruments | None = None,
    ) -> None:
        self._context = context
        self._runtime = runtime_of(context)
        self._core = self._runtime.core
        self._distributed = context.distributed
        self._is_chief = context.distributed.rank == 0
        self._callbacks = callbacks
        self._progress = progress
        self._window = window
        self._sync_points = sync_points
        self._saver = saver
        self._sinks = sinks
        self._on_progress = on_progress
        self._judge = judge
        self._instruments = instruments
        self._telemetry: TelemetryReports | None = None
        self.writer = ReportWriter(deadline_s=timeout_from_environ())
        self._count_records: Callable[[int, int], int] = lambda _start, _end: 0
        self.batches_total: int | None = None  # None if unknown
        self._window_seconds = 0.0
        self._window_start = 0
        self._mark_s = 0.0
        self._has_reported = False
        self._pending: Exchange | None = None
        self._reports_metrics = self._runtime.mpu.should_report_metrics
        self._heartbeat = heartbeat()

    # ---- the run -------------------------------------------------------------------------------------

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
        """Open the sinks on the chief; ``stack`` closes them and ends the thread.

        ``count_records`` returns the records of all replicas in a range of batches.
        """
        self._count_records, self.batches_total = count_records, batches_total
        stack.callback(self.writer.close)
        if not self._is_chief:
            return
        stack.callback(self.writer.call, self._sinks.close)
        self.writer.call(self._sinks.open)
        if self._instruments is not None:
            self._telemetry = TelemetryReports(
                self._record_telemetry, self._keep_telemetry, self._instruments.known_peak()
            )
            stack.callback(self.writer.submit, self._telemetry.keep)

    def start_clock(self) -> None:
        self._mark_s = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Seconds of training since the clock was started or a report began."""
        return time.monotonic() - self._mark_s

    def submit_progress(self) -> None:
        if self._is_chief and self.batches_total is not None:
            told = functools.partial(self._on_progress, self._progress.batches_trained, self.batches_total)
            self.writer.submit(told)

    def upload(self) -> None:
        self.writer.submit(self._sinks.upload)

    def require_written(self) -> None:
        """Wait until all reports are written, or raise. Ranks: all, collectively."""
        self.writer.flush()
        self._raise_unwritten(self._distributed.allgather(self.writer.failure))

    # ---- an exchange ---------------------------------------------------------------------------------

    @property
    def is_under_way(self) -> bool:
        """Whether an exchange has begun and not ended; the same on all ranks."""
        return self._pending is not None

    @property
    def has_unreported(self) -> bool:
        return self._progress.batches_trained > self._window_start

    @property
    def may_defer(self) -> bool:
        """Whether training may go on for a batch before an exchange ends.

        Not if the user's callback or reducer belongs to the report: these are called at the batch of the report.
        """
        is_alone = self._sync_points.is_single_rank and self._context.device.type == "cpu"
        return not (is_alone or self._reports_at_once) and self._sync_points.may_wait

    @functools.cached_property
    def _reports_at_once(self) -> bool:
        is_reduced = any(wrapped.for_training for wrapped in self._runtime.wrapped_reducers)
        return is_reduced or self._callbacks.overrides("on_training_workload_end")

    def begin(self, *, reports: bool, defers: bool = False) -> None:
        """Start an exchange. Ranks: all, collectively.

        Args:
            reports: whether totals are handed in; the window is then closed.
            defers: whether training goes on before the end. Totals then leave the device while it works; if ranks would have to
                wait for a device, the exchange starts only at ``end``, when the device has long come so far.
        """
        now_s = time.monotonic()
        trained_s, self._mark_s = now_s - self._mark_s, now_s
        self._window_seconds += trained_s
        if self._instruments is not None:
            self._instruments.trained(trained_s)
        shares = reports and self._reports_metrics and len(self._window)
        totals = self._window.async_totals() if shares else None
        self._pending = begun = Exchange(
            self._progress.batches_trained,
            self._window_start,
            self._window_seconds,
            totals,
            step_counts(self._context) if reports else [],
            reports=reports,
            is_deferred=defers,
        )
        if reports and self._instruments is not None:
            begun.sample = self._instruments.sample(begun.batches)
        if defers and reports:
            self._close_window()
        if not defers or self._context.device.type == "cpu":
            self._send(begun)

    def end(self) -> StopReason | None:
        """Finish the exchange and act on it; return why to stop. Ranks: all, collectively.

        Raises:
            DstrialError: training does not train, or a save has failed.
            Exception: a failure of the writing thread.
        """
        begun = self._pending
        assert begun is not None, "an exchange begins before it ends"
        if not begun.is_sent:
            self._send(begun)
        self._pending = None
        agreement = self._sync_points.end()
        failures = [failure for _, _, _, failure, _ in agreement.shares]
        if not any(failures):
            self._saver.settle([status for _, _, status, _, _ in agreement.shares])
        shares = [share and MetricTotals.unpack(share) for share, _, _, _, _ in agreement.shares]
        averages = combine(shares, self._window.where) if begun.reports else {}
        if begun.reports:
            self._report(dict(averages), begun)
            self._report_telemetry([sample for _, _, _, _, sample in agreement.shares], begun)
        self._raise_unwritten(failures)
        if begun.reports:
            self._judge(shares, averages, agreement.shares[0][1], begun)
        self.submit_progress()
        if not begun.is_deferred:
            self.start_clock()
        return agreement.stop

    def _send(self, begun: Exchange) -> None:
        share = None if begun.totals is None else begun.totals.wait().pack()
        sample = None if begun.sample is None else begun.sample.wait().pack()
        counts = begun.counts if self._is_chief else []
        payload = (share, counts, self._saver.status(), self.writer.failure, sample)
        self._sync_points.begin(begun.batches, payload)
        begun.is_sent = True

    # ---- a report ------------------------------------------------------------------------------------

    def _report(self, averages: dict[str, Any], begun: Exchange) -> None:
        runtime, batches = self._runtime, begun.batches
        if not begun.is_deferred and any(wrapped.for_training for wrapped in runtime.wrapped_reducers):
            reduced = self._context.reduce_metrics(for_training=True)
            averages.update(pytorch._convert_metrics_to_numpy(reduced))
        batch_metrics = [] if begun.is_deferred else self._window.batches()
        if not self._callbacks.is_empty:
            with self._heartbeat.during(Phase.CALLBACK, self._progress.batches_trained):
                self._callbacks.call(
                    "on_training_workload_end", avg_metrics=dict(averages), batch_metrics=batch_metrics
                )
        if self._is_chief:
            metrics = dict(averages)
            seconds = max(begun.seconds, 1e-9)
            metrics.setdefault("batches_per_second", (batches - begun.start) / seconds)
            metrics.setdefault("samples_per_second", self._count_records(begun.start, batches) / seconds)
            self.submit_training(batches, metrics)
            if not self._has_reported:
                self.writer.flush()  # it imports TensorBoard, and no code of the user's should run beside that
            self._has_reported = True
        if self._sinks.is_upload_due():
            self.upload()
        if not begun.is_deferred:
            self._close_window()

    def submit_training(self, batches: int, metrics: Mapping[str, Any]) -> None:
        """Have a report of training metrics written. Ranks: the chief."""
        # Of the user's: a reducer, for one, may use its arrays again.
        mine = {name: copied(value) for name, value in metrics.items()}
        self.writer.submit(functools.partial(self._write, batches, mine))

    def report_validation(
        self,
        metrics: Mapping[str, Any],
        *,
        epochs: int,
        policy: Literal["best", "all", "none"],
        searcher_metric: str | None,
        smaller_is_better: bool,
    ) -> bool:
        """Report validation metrics; return whether the policy asks for a checkpoint.

        Raises:
            SearcherMetricError: the searcher's metric is missing, or no number.

        Ranks: all, collectively.
        """
        _require_searcher_metric(metrics, searcher_metric)
        saves = False
        error: Exception | None = None
        batches = self._progress.batches_trained
        if self._is_chief:
            try:
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
                saves = asks_for_checkpoint(policy, now, best_before, smaller_is_better=smaller_is_better)
            except Exception as caught:  # noqa: BLE001  # raised again below, after the other ranks know of it
                error = caught
        self.upload()
        saves, failure = self._distributed.broadcast((saves, sync_point.described(error)))
        if error is not None:
            raise error
        if failure is not None:
            raise sync_point.peer_failed("the report of a validation", [(0, failure)])
        self._progress.last_validation = batches
        return bool(saves)

    def _report_telemetry(self, samples: Sequence[str | None], begun: Exchange) -> None:
        if self._telemetry is None or None in samples:
            return
        found = [RankSample.unpack(sample) for sample in samples if sample is not None]
        num_records = self._count_records(begun.batches - found[0].num_batches, begun.batches)
        skipped = sum(count.num_skipped for count in begun.counts)
        self.writer.submit(
            functools.partial(self._telemetry.write, found, begun.batches, num_records, skipped)
        )

    def _record_telemetry(self, batches: int, metrics: dict[str, Any]) -> None:
        self._core.train.report_metrics(GROUP, steps_completed=batches, metrics=metrics)
        self._sinks.report_telemetry(batches, metrics)

    def _keep_telemetry(self, totals: Mapping[str, Any]) -> None:
        if (kept := self._runtime.kept_reports) is not None:
            kept.note_telemetry(totals)

    def finish_telemetry(self) -> None:
        """Measure the device's peak if no run on this machine has.

        Called after the last save, when nobody waits for the device.
        """
        if self._telemetry is not None and self._instruments is not None:
            measure = self._instruments.measured_peak
            self.writer.flush()
            self._telemetry.finish(measure)

    def _close_window(self) -> None:
        """Begin the next report's window at the current batch."""
        runtime = self._runtime
        self._window.reset()
        for wrapped in runtime.wrapped_reducers:
            if wrapped.for_training:
                wrapped.reset()
        runtime.reductions_of_absent_ranks.clear()
        self._window_seconds = 0.0
        self._window_start = self._progress.batches_trained

    def _write(self, batches: int, metrics: Mapping[str, Any]) -> None:
        self._core.train.report_training_metrics(steps_completed=batches, metrics=dict(metrics))
        if self.batches_total is not None:
            self._core.train.report_progress(min(batches / self.batches_total, 1.0))
        self._sinks.report("training", batches, metrics)

    def _raise_unwritten(self, failures: Sequence[str | None]) -> None:
        """Raise, on all ranks together, a failure of any rank's writing thread."""
        if not any(failures):
            return
        error = self.writer.take_error()
        if error is not None:
            raise error
        told = [(rank, text) for rank, text in enumerate(failures) if text is not None]
        raise sync_point.peer_failed("the writing of a report", told)


def _require_searcher_metric(metrics: Mapping[str, Any], name: str | None) -> None:
    if name is None or name in ("batches", "epochs"):  # every validation has them
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
    """Return the optimizer steps of every engine that has an optimizer."""
    return [StepCounts.of(engine) for engine in context.models if engine.optimizer is not None]
