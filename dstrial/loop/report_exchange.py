"""Exchange metrics and stop requests between ranks; report the reduced metrics.

If only a report is due, the loop trains the next batch during the exchange. Rank 0 then submits averages to ``ReportWriter``.
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
from dstrial.loop.metric_sinks import MetricSink, MetricSinks, ReportWriter
from dstrial.loop.metrics import AsyncTotals, MetricTotals, MetricWindow, combine, copied
from dstrial.loop.non_finite import NonFiniteGuard
from dstrial.loop.sync_point import StopReason, SyncPoints
from dstrial.ranks.control_channel import timeout_from_environ
from dstrial.ranks.heartbeat import Phase, heartbeat
from dstrial.telemetry.instruments import AsyncSample, Instruments, TelemetryReports
from dstrial.telemetry.samples import GROUP, RankSample
from dstrial.trial.context import DeepSpeedTrialContext, runtime_of
from dstrial.trial.determined_errors import SearcherMetricError

logger = logging.getLogger("dstrial.loop")


@dataclasses.dataclass(slots=True)
class Exchange:
    """One exchange of metrics and stop requests between ranks.

    Attributes:
        batches: finished batches at the start of the exchange.
        start: finished batches at the previous report.
        seconds: training time between ``start`` and ``batches``.
        totals: metrics of this rank; None without a report, or if this rank reports no metrics.
        counts: optimizer steps of every engine; empty without a report.
        reports: whether metrics are reported.
        is_deferred: whether the next batch is trained before the exchange ends.
        is_sent: whether this rank has sent its payload.
        sample: this rank's telemetry; None if telemetry is off.
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


class ReportExchange:
    """Exchanges metrics and stop requests between ranks; reports the averages.

    Args:
        window: this rank's metrics since the last report.
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
        context: DeepSpeedTrialContext,
        callbacks: Callbacks,
        progress: Progress,
        window: MetricWindow,
        sync_points: SyncPoints,
        saver: CheckpointSaver,
        sinks: Sequence[MetricSink],
        instruments: Instruments | None = None,
    ) -> None:
        self._context = context
        self._runtime = runtime_of(context)
        self._core = self._runtime.core
        self._distributed = context.distributed
        self._is_chief = self._runtime.is_chief
        self._callbacks = callbacks
        self._progress = progress
        self._window = window
        self._sync_points = sync_points
        self._saver = saver
        self._sinks = MetricSinks(context, sinks)
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
        self._pending: Exchange | None = None

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
        """Seconds of training since ``start_clock`` or since the last exchange began."""
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
    def is_under_way(self) -> bool:
        """Whether ``begin`` was called and not yet ``end``; equal on all ranks."""
        return self._pending is not None

    @property
    def has_unreported(self) -> bool:
        return self._progress.batches_trained > self._window_start

    @property
    def may_defer(self) -> bool:
        """Whether an exchange may end one batch late, because batches are short.

        False if the user has a reducer or a callback for reports, which must run at the report's batch.
        """
        is_alone = self._sync_points.is_single_rank and self._context.device.type == "cpu"
        return not (is_alone or self._reports_at_once) and self._sync_points.may_wait

    @functools.cached_property
    def _reports_at_once(self) -> bool:
        return bool(self._training_reducers) or self._callbacks.overrides("on_training_workload_end")

    @property
    def _training_reducers(self) -> list[Any]:
        return [wrapped for wrapped in self._runtime.wrapped_reducers if wrapped.for_training]

    def begin(self, *, reports: bool, defers: bool = False) -> None:
        """Start an exchange. Ranks: all, collectively.

        Args:
            reports: whether the payload contains the totals of a report.
            defers: whether the next batch is trained before ``end``. Totals are then copied while the device trains. With an
                accelerator, the payload is sent only at ``end``, because sending waits for this copy.
        """
        now_s = time.monotonic()
        trained_s, self._mark_s = now_s - self._mark_s, now_s
        self._window_seconds += trained_s
        if self._instruments is not None:
            self._instruments.trained(trained_s)
        has_totals = reports and self._runtime.mpu.should_report_metrics and len(self._window)
        self._pending = exchange = Exchange(
            self._progress.batches_trained,
            self._window_start,
            self._window_seconds,
            self._window.async_totals() if has_totals else None,
            step_counts(self._context) if reports else [],
            reports=reports,
            is_deferred=defers,
        )
        if reports and self._instruments is not None:
            exchange.sample = self._instruments.sample(exchange.batches)
        if defers and reports:
            self._close_window()
        if not defers or self._context.device.type == "cpu":
            self._send(exchange)

    def end(self) -> StopReason | None:
        """Finish the exchange and report; return the reason to stop, or None.

        Raises:
            NonFiniteError: losses or steps fail the checks of ``guard``.
            CheckpointError: a background save has failed.
            Exception: a report could not be written.

        Ranks: all, collectively.
        """
        exchange = self._pending
        assert exchange is not None, "an exchange begins before it ends"
        if not exchange.is_sent:
            self._send(exchange)
        self._pending = None
        result = self._sync_points.end()
        failures = [failure for _, _, _, failure, _ in result.payloads]
        if not any(failures):
            self._saver.settle([status for _, _, status, _, _ in result.payloads])
        totals = [packed and MetricTotals.unpack(packed) for packed, _, _, _, _ in result.payloads]
        averages = combine(totals, self._window.where) if exchange.reports else {}
        if exchange.reports:
            self._report(dict(averages), exchange)
            self._report_telemetry([sample for _, _, _, _, sample in result.payloads], exchange)
        self._raise_unwritten(failures)
        if exchange.reports and self.guard is not None:
            self._judge(self.guard, totals, averages, result.payloads[0][1], exchange)
        self.submit_progress()
        if not exchange.is_deferred:
            self.start_clock()
        return result.stop

    def _send(self, exchange: Exchange) -> None:
        totals = None if exchange.totals is None else exchange.totals.wait().pack()
        sample = None if exchange.sample is None else exchange.sample.wait().pack()
        counts = exchange.counts if self._is_chief else []
        payload = (totals, counts, self._saver.status(), self.writer.failure, sample)
        self._sync_points.begin(exchange.batches, payload)
        exchange.is_sent = True

    def _judge(
        self,
        guard: NonFiniteGuard,
        totals: Sequence[MetricTotals | None],
        averages: Mapping[str, Any],
        chief_counts: Sequence[StepCounts],
        exchange: Exchange,
    ) -> None:
        kept, (taken, skipped) = self._runtime.kept_reports, sum_steps(exchange.counts)
        if skipped and self._is_chief and kept is not None:
            self.writer.submit(functools.partial(kept.note_steps, taken, skipped))
        guard.judge(
            [of_rank.finite for of_rank in totals if of_rank is not None],
            averages,
            chief_counts,
            exchange.start,
            is_last=self.batches_total is not None and exchange.batches >= self.batches_total,
        )

    # ---- report --------------------------------------------------------------------------------------

    def _report(self, averages: dict[str, Any], exchange: Exchange) -> None:
        batches = exchange.batches
        if not exchange.is_deferred and self._training_reducers:
            reduced = self._context.reduce_metrics(for_training=True)
            averages.update(pytorch._convert_metrics_to_numpy(reduced))
        if not self._callbacks.is_empty:
            batch_metrics = [] if exchange.is_deferred else self._window.batches()
            with heartbeat().during(Phase.CALLBACK, self._progress.batches_trained):
                self._callbacks.call(
                    "on_training_workload_end", avg_metrics=dict(averages), batch_metrics=batch_metrics
                )
        if self._is_chief:
            metrics = dict(averages)
            seconds = max(exchange.seconds, 1e-9)
            metrics.setdefault("batches_per_second", (batches - exchange.start) / seconds)
            metrics.setdefault("samples_per_second", self._count_records(exchange.start, batches) / seconds)
            self.submit_training(batches, metrics)
            if not self._has_reported:
                self.writer.flush()  # the first report imports TensorBoard, during which user code should not run
            self._has_reported = True
        if self._sinks.is_upload_due():
            self.upload()
        if not exchange.is_deferred:
            self._close_window()

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
            except Exception as caught:  # noqa: BLE001  # raised again below, after the other ranks were informed
                error = caught
        self.upload()
        saves, failure = self._distributed.broadcast((saves, sync_point.described(error)))
        if error is not None:
            raise error
        if failure is not None:
            raise sync_point.peer_failed("the report of a validation", [(0, failure)])
        self._progress.last_validation = batches
        return bool(saves)

    def _report_telemetry(self, samples: Sequence[str | None], exchange: Exchange) -> None:
        if self._telemetry is None or None in samples:
            return
        found = [RankSample.unpack(sample) for sample in samples if sample is not None]
        num_records = self._count_records(exchange.batches - found[0].num_batches, exchange.batches)
        _, skipped = sum_steps(exchange.counts)
        self.writer.submit(
            functools.partial(self._telemetry.write, found, exchange.batches, num_records, skipped)
        )

    def _record_telemetry(self, batches: int, metrics: dict[str, Any]) -> None:
        self._core.train.report_metrics(GROUP, steps_completed=batches, metrics=metrics)
        self._sinks.report(GROUP, batches, metrics)

    def _keep_telemetry(self, totals: Mapping[str, Any]) -> None:
        if (kept := self._runtime.kept_reports) is not None:
            kept.note_telemetry(totals)

    def _close_window(self) -> None:
        self._window.reset()
        for wrapped in self._training_reducers:
            wrapped.reset()
        self._runtime.reductions_of_absent_ranks.clear()
        self._window_seconds = 0.0
        self._window_start = self._progress.batches_trained

    def _raise_unwritten(self, failures: Sequence[str | None]) -> None:
        """Raise an error if any rank has failed to write a report."""
        if not any(failures):
            return
        error = self.writer.take_error()
        if error is not None:
            raise error
        told = [(rank, text) for rank, text in enumerate(failures) if text is not None]
        raise sync_point.peer_failed("the writing of a report", told)


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
