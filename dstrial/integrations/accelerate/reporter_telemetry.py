"""Telemetry of an Accelerate loop, by rank, at every report of its ``Reporter``.

Samples travel with the exchange of the report. Waiting for data and FLOPs are known of loops over ``Reporter.batches`` only.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from dstrial.config.dotted_keys import dstrial_section
from dstrial.engine.finite_weights import StepCounts
from dstrial.local.measuring_variables import is_measuring
from dstrial.loop.metric_sinks import MetricSinks
from dstrial.telemetry.instruments import Instruments
from dstrial.telemetry.reporting import TelemetryReports
from dstrial.telemetry.samples import GROUP, RankSample
from dstrial.trial.context import DeepSpeedTrialContext, runtime_of


class ReporterTelemetry:
    """Measures one rank of a loop; the chief writes the measurements of all ranks.

    Does nothing where ``data.dstrial.telemetry`` is false, and where dsat measures. No communication, no synchronisation.
    """

    def __init__(
        self,
        context: DeepSpeedTrialContext,
        sinks: MetricSinks,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._context, self._runtime, self._sinks, self._clock = context, runtime_of(context), sinks, clock
        asked = dstrial_section(self._runtime.exp_conf).get("telemetry")
        self._is_on = asked is not False and not is_measuring(self._runtime.hparams or {})
        self._instruments: Instruments | None = None
        self._reports: TelemetryReports | None = None
        self._counting = contextlib.ExitStack()
        self._is_first, self._is_counting = True, False
        self._has_loader = False
        self._waited_s = 0.0

    def begin(self, batches_trained: int) -> None:
        if not self._is_on:
            return
        engine = self._context.models[0]
        self._instruments = Instruments(
            self._context.models,
            self._runtime.adapter.data_parallel_rank,
            shares_sequences=int(engine.seq_dp_world_size) != int(engine.dp_world_size),
        )
        self._instruments.__enter__()
        self._instruments.begin(batches_trained)
        self._instruments.switch(True)
        if self._context.distributed.rank == 0:
            self._reports = TelemetryReports(self._record, self._keep, self._instruments.known_peak())

    def watched(self, micro_batches: Iterable[Any]) -> Iterator[Any]:
        """Yield a loader's items, and measure how long the rank waits for them."""
        found, ended = iter(micro_batches), object()
        self._has_loader = True
        while True:
            began_s = self._clock()
            micro_batch = next(found, ended)
            self._waited_s += self._clock() - began_s
            if micro_batch is ended:
                return
            yield micro_batch

    def begin_micro_batch(self, micro_batch: Any) -> None:
        if self._instruments is None:
            return
        self._instruments.drew(micro_batch, self._waited_s)
        self._waited_s = 0.0
        self._instruments.switch(True)
        if self._is_first and not self._is_counting:
            self._is_counting = True
            self._counting.enter_context(self._instruments.counting())

    def end_batch(self, batches_trained: int, seconds: float, *, pauses: bool) -> None:
        """Record the end of a batch, for a first one ``seconds`` after training began.

        ``pauses``: the script does something else than to train next.
        """
        if self._instruments is None:
            return
        # What it does before it asks for the next micro batch is no training, where it asks.
        self._instruments.switch(not (self._has_loader or pauses))
        if self._is_first:
            self._is_first = False
            self._counting.close()
            if not self._has_loader:
                self._instruments.without_loader()
            self._instruments.end_first_batch(batches_trained, seconds)

    def resume(self) -> None:
        """Record that training goes on, for scripts that draw records themselves."""
        if self._instruments is not None and not self._has_loader:
            self._instruments.switch(True)

    def trained(self, seconds: float) -> None:
        """Add seconds of training since the last call."""
        if self._instruments is not None:
            self._instruments.trained(seconds)

    def sample(self, batches_trained: int) -> RankSample | None:
        """Return this rank's sample since the last report; None if switched off."""
        return None if self._instruments is None else self._instruments.sample(batches_trained).wait()

    def report(
        self, samples: Sequence[RankSample | None], batches_trained: int, records_per_batch: int
    ) -> None:
        """Write the samples of all ranks (index = rank) on the chief."""
        found = [sample for sample in samples if sample is not None]
        if self._reports is None or len(found) < len(samples):
            return
        skipped = sum(StepCounts.of(engine).num_skipped for engine in self._context.models)
        self._reports.write(found, batches_trained, found[0].num_batches * records_per_batch, skipped)

    def finish(self) -> None:
        """Measure the device's peak on the chief, unless a run on this machine has."""
        if self._reports is not None and self._instruments is not None:
            self._reports.finish(self._instruments.measured_peak)

    def close(self) -> None:
        """Keep the totals, and restore the engines; idempotent."""
        self._counting.close()
        instruments, self._instruments = self._instruments, None
        if instruments is None:
            return
        instruments.__exit__()
        if self._reports is not None:
            self._reports.keep()

    def _record(self, batches_trained: int, metrics: dict[str, Any]) -> None:
        self._runtime.core.train.report_metrics(GROUP, steps_completed=batches_trained, metrics=metrics)
        self._sinks.report_telemetry(batches_trained, metrics)

    def _keep(self, totals: Mapping[str, Any]) -> None:
        if (kept := self._runtime.kept_reports) is not None:
            kept.note_telemetry(totals)
