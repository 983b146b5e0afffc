"""What ranks tell each other at points of a run, and the report that comes of it.

A report's totals travel with whatever else is agreed on. Where nothing follows at once training goes on for a batch meanwhile;
the averages then go to a thread that writes (``dstrial.loop.report_writer``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from determined import pytorch

from dstrial.engine.finite_weights import StepCounts
from dstrial.loop import sync_point
from dstrial.loop.boundaries import Progress
from dstrial.loop.callbacks import Callbacks
from dstrial.loop.checkpoint_saver import CheckpointSaver
from dstrial.loop.data.training import TrainingStream
from dstrial.loop.metric_sinks import MetricSinks
from dstrial.loop.metrics import LeavingTotals, MetricTotals, MetricWindow, combine
from dstrial.loop.report_writer import ReportWriter, TrainingReport
from dstrial.loop.run_state import copied
from dstrial.loop.sync_point import StopReason, SyncPoints
from dstrial.ranks.control_channel import timeout_from_environ
from dstrial.ranks.heartbeat import Phase, heartbeat
from dstrial.telemetry.instruments import Instruments, LeavingSample
from dstrial.telemetry.reporting import TelemetryReports
from dstrial.telemetry.samples import GROUP, RankSample
from dstrial.trial.context import DeepSpeedTrialContext, runtime_of

logger = logging.getLogger("dstrial.loop")


@dataclasses.dataclass(slots=True)
class Exchange:
    """An exchange between ranks that has begun.

    Attributes:
        batches: finished batches at its beginning.
        start: the same at the report before it.
        seconds: trained between the two.
        totals: of this rank; None without a report, or where it has no part in it.
        counts: optimizer steps of every engine.
        reports: whether it is for a report.
        is_deferred: whether training goes on before its end.
        is_handed_in: whether the other ranks get this rank's share already.
        sample: of this rank's instruments; None without them.
    """

    batches: int
    start: int
    seconds: float
    totals: LeavingTotals | None
    counts: list[StepCounts]
    reports: bool
    is_deferred: bool
    is_handed_in: bool = False
    sample: LeavingSample | None = None


Judge = Callable[[Sequence[MetricTotals | None], Mapping[str, Any], Sequence[StepCounts], Exchange], None]
"""Looks at the shares of all ranks, the averages, and the chief's steps at its own turn and at the exchange's beginning."""


class ReportExchange:
    """Has ranks agree at points of a run, and reports what they have trained.

    Args:
        context: of the trial, its engines wrapped.
        callbacks: of the trial.
        progress: of the run.
        window: what ``train_batch`` has returned since the last report.
        sync_points: the schedule of agreements.
        saver: of checkpoints, whose state is agreed on, too.
        sinks: where metrics go besides the record.
        on_progress: told the finished batches and the total on the chief.
        judge: raises, on all ranks, where a report shows that training does not train.
        instruments: of this rank; None where they are switched off, alike on all ranks.
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
        self.writer = ReportWriter(self._record, self._publish, deadline_s=timeout_from_environ())
        self._stream: TrainingStream | None = None
        self._batches_total = 0
        self._window_seconds = 0.0
        self._window_start = 0
        self._mark_s = 0.0
        self._has_reported = False
        self._begun: Exchange | None = None
        self._reports_metrics = self._runtime.mpu.should_report_metrics
        self._heartbeat = heartbeat()

    # ---- the run -------------------------------------------------------------------------------------

    def restore(self, loop_state: Mapping[str, Any]) -> None:
        """Go on with the window of a checkpoint. Ranks: each its own."""
        self._window_seconds = float(loop_state.get("window_seconds", 0.0))
        self._window_start = int(loop_state.get("window_start", self._progress.batches_trained))

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of it, plain values only. Ranks: each its own."""
        return {"window_seconds": self._window_seconds, "window_start": self._window_start}

    def open(
        self,
        stack: contextlib.ExitStack,
        stream: TrainingStream,
        batches_total: int,
    ) -> None:
        """Open sinks where they are used.

        Args:
            stack: closes them, and ends the thread.
            stream: counts records.
            batches_total: length of the run.
        """
        self._stream, self._batches_total = stream, batches_total
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
        """Count seconds of training from now on."""
        self._mark_s = time.monotonic()

    def tell_progress(self) -> None:
        """Have the chief told how far the run is. Ranks: any; no communication."""
        if self._is_chief:
            told = functools.partial(self._on_progress, self._progress.batches_trained, self._batches_total)
            self.writer.submit(told)

    def upload(self) -> None:
        """Have event files leave this rank, behind the loop."""
        self.writer.submit(self._sinks.upload)

    def publish_validation(self, metrics: Mapping[str, Any]) -> None:
        """Hand a validation's metrics to all sinks, and wait. Ranks: the chief."""
        batches = self._progress.batches_trained
        self.writer.call(lambda: self._sinks.report("validation", batches, metrics))

    def require_written(self) -> None:
        """Wait until all reports are written. Ranks: all, collectively.

        Raises:
            Exception: what has failed behind the loop, on this rank.
            PeerFailedError: it has failed on another one.
        """
        self.writer.flush()
        self._raise_unwritten(self._distributed.allgather(self.writer.failure))

    # ---- an exchange ---------------------------------------------------------------------------------

    @property
    def is_under_way(self) -> bool:
        """Whether an exchange has begun and not ended; the same on all ranks."""
        return self._begun is not None

    @property
    def has_unreported(self) -> bool:
        """Whether batches were trained since the last report."""
        return self._progress.batches_trained > self._window_start

    @property
    def may_defer(self) -> bool:
        """Whether training may go on for a batch before an exchange ends.

        The same on all ranks. Not where a callback or a reducer of the user's belongs to the report: these are called at
        the batch whose report it is.
        """
        is_alone = self._sync_points.is_single_rank and self._context.device.type == "cpu"
        return not (is_alone or self._reports_at_once) and self._sync_points.may_wait

    @functools.cached_property
    def _reports_at_once(self) -> bool:
        is_reduced = any(wrapped.for_training for wrapped in self._runtime.wrapped_reducers)
        return is_reduced or self._callbacks.overrides("on_training_workload_end")

    def begin(self, *, reports: bool, defers: bool = False) -> None:
        """Hand in this rank's share. Ranks: all, collectively.

        Args:
            reports: whether totals are handed in; the window is then closed.
            defers: whether training goes on before the end. Then totals leave the device while it works, and where the ranks
                wait for a device their exchange begins only at the end, when it has long come so far.
        """
        now_s = time.monotonic()
        trained_s, self._mark_s = now_s - self._mark_s, now_s
        self._window_seconds += trained_s
        if self._instruments is not None:
            self._instruments.trained(trained_s)
        totals = self._window.leaving_totals() if reports and self._reports_metrics else None
        self._begun = begun = Exchange(
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
            self._hand_in(begun)

    def end(self) -> StopReason | None:
        """Hear of the other ranks and act on it; return why to stop. Ranks: all.

        Raises:
            DstrialError: training does not train, or a save has failed.
            Exception: what has failed behind the loop.
        """
        begun = self._begun
        assert begun is not None, "an exchange begins before it ends"
        if not begun.is_handed_in:
            self._hand_in(begun)
        self._begun = None
        agreement = self._sync_points.end()
        failures = [failure for _, _, _, failure, _ in agreement.shares]
        if not any(failures):
            self._saver.settle([status for _, _, status, _, _ in agreement.shares])
            self._saver.prepare()
        shares = [share for share, _, _, _, _ in agreement.shares]
        averages = combine(shares, "train_batch") if begun.reports else {}
        if begun.reports:
            self._report(dict(averages), begun)
            self._tell_of_run([sample for _, _, _, _, sample in agreement.shares], begun)
        self._raise_unwritten(failures)
        if begun.reports:
            self._judge(shares, averages, agreement.shares[0][1], begun)
        self.tell_progress()
        if not begun.is_deferred:
            self.start_clock()
        return agreement.stop

    def _hand_in(self, begun: Exchange) -> None:
        share = None if begun.totals is None else begun.totals.wait()
        sample = None if begun.sample is None else begun.sample.wait()
        handed_in = (share, begun.counts, self._saver.status(), self.writer.failure, sample)
        self._sync_points.begin(begun.batches, handed_in)
        begun.is_handed_in = True

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
            assert self._stream is not None
            metrics = dict(averages)
            seconds = max(begun.seconds, 1e-9)
            metrics.setdefault("batches_per_second", (batches - begun.start) / seconds)
            num_records = self._stream.count_records(begun.start, batches)
            metrics.setdefault("samples_per_second", num_records / seconds)
            # Of the user's: a reducer, for one, may use its arrays again.
            mine = {name: copied(value) for name, value in metrics.items()}
            self.writer.report(TrainingReport(batches, mine))
            if not self._has_reported:
                self.writer.flush()  # it imports TensorBoard, and no code of the user's should run beside that
            self._has_reported = True
        if self._sinks.is_upload_due():
            self.upload()
        if not begun.is_deferred:
            self._close_window()

    def _tell_of_run(self, samples: Sequence[RankSample | None], begun: Exchange) -> None:
        """Have what all ranks' instruments saw written behind the loop.

        Ranks: the chief acts.
        """
        found = [sample for sample in samples if sample is not None]
        if self._telemetry is None or len(found) < len(samples):
            return
        assert self._stream is not None
        num_records = self._stream.count_records(begun.batches - found[0].num_batches, begun.batches)
        skipped = sum(count.num_skipped for count in begun.counts)
        self.writer.submit(
            functools.partial(self._telemetry.write, found, begun.batches, num_records, skipped)
        )

    def _record_telemetry(self, batches: int, metrics: dict[str, Any]) -> None:
        """Put it on the run's record. Ranks: the chief's writer thread."""
        self._core.train.report_metrics(GROUP, steps_completed=batches, metrics=metrics)
        self._sinks.report_telemetry(batches, metrics)

    def _keep_telemetry(self, totals: Mapping[str, Any]) -> None:
        if (kept := self._runtime.kept_reports) is not None:
            kept.note_telemetry(totals)

    def finish_telemetry(self) -> None:
        """Measure the device's peak if no run on this machine has.

        Ranks: any; the chief acts. Called where all is trained and saved, so that nobody waits for the device.
        """
        if self._telemetry is not None and self._instruments is not None:
            measure = self._instruments.measured_peak
            self.writer.flush()
            self._telemetry.finish(measure)

    def _close_window(self) -> None:
        """Begin the next report's window at the batch of now."""
        runtime = self._runtime
        self._window.reset()
        for wrapped in runtime.wrapped_reducers:
            if wrapped.for_training:
                wrapped.reset()
        runtime.reductions_of_absent_ranks.clear()
        self._window_seconds = 0.0
        self._window_start = self._progress.batches_trained

    def _record(self, report: TrainingReport) -> None:
        """Make a report part of the run's record. Ranks: the chief's writer thread."""
        self._core.train.report_training_metrics(
            steps_completed=report.batches_trained, metrics=dict(report.metrics)
        )

    def _publish(self, report: TrainingReport) -> None:
        """Hand a report to all others. Ranks: the chief, on the thread that writes."""
        self._core.train.report_progress(min(report.batches_trained / self._batches_total, 1.0))
        self._sinks.report("training", report.batches_trained, report.metrics)

    def _raise_unwritten(self, failures: Sequence[str | None]) -> None:
        """Raise, on all ranks together, what has failed behind the loop on any of them."""
        if not any(failures):
            return
        error = self.writer.take_error()
        if error is not None:
            raise error
        told = [(rank, text) for rank, text in enumerate(failures) if text is not None]
        raise sync_point.peer_failed("the writing of a report", told)


def step_counts(context: DeepSpeedTrialContext) -> list[StepCounts]:
    """Return the optimizer steps of every engine.

    Not of one without an optimizer: somebody else steps it, if at all.
    """
    return [StepCounts.of(engine) for engine in context.models if engine.optimizer is not None]
