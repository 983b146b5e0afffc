"""Telemetry of loops that are not dstrial's: a Trainer's and a ``Reporter``'s.

No communication, no synchronisation of a device, and nothing where ``data.dstrial.telemetry`` is false or dsat measures.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from deepspeed import DeepSpeedEngine
from determined import core

from dstrial.config.dotted_keys import dstrial_section
from dstrial.engine.finite_weights import StepCounts
from dstrial.local.train_context import LocalTrainContext
from dstrial.loop.metric_sinks import MetricSinks
from dstrial.telemetry.instruments import Instruments
from dstrial.telemetry.reporting import TelemetryReports
from dstrial.telemetry.samples import GROUP, RankSample


class LoopTelemetry:
    """Measures one rank of a loop; the chief writes the samples of all ranks."""

    def __init__(
        self,
        core_context: core.Context,
        exp_conf: Mapping[str, Any] | None,
        *,
        is_off: bool,
        sinks: MetricSinks | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._is_on = not is_off and dstrial_section(exp_conf).get("telemetry") is not False
        self._train = core_context.train
        self._is_chief = core_context.distributed.rank == 0
        self._sinks = sinks
        self._clock = clock
        self._engines: Sequence[DeepSpeedEngine] = ()
        self._instruments: Instruments | None = None
        self._reports: TelemetryReports | None = None
        self._counting = contextlib.ExitStack()
        self._is_first, self._is_counting = True, False

    def _open(
        self,
        engines: Sequence[DeepSpeedEngine],
        step: int,
        replica: int = 0,
        *,
        shares_sequences: bool = False,
    ) -> None:
        self._engines = engines
        self._instruments = Instruments(engines, replica, shares_sequences=shares_sequences)
        self._instruments.__enter__()
        self._instruments.begin(step)
        if self._is_chief:
            self._reports = TelemetryReports(self._record, self._keep, self._instruments.known_peak())

    def _count_first_batch(self) -> None:
        if self._instruments is not None and self._is_first and not self._is_counting:
            self._is_counting = True
            self._counting.enter_context(self._instruments.counting())

    def sample(self, step: int) -> RankSample | None:
        """Return this rank's sample since the last report; None if switched off."""
        return None if self._instruments is None else self._instruments.sample(step).wait()

    def report(self, samples: Sequence[RankSample | None], step: int, records_per_batch: int) -> None:
        """Write the samples of all ranks (index = rank) on the chief."""
        found = [sample for sample in samples if sample is not None]
        if self._reports is None or len(found) < len(samples):
            return
        skipped = sum(StepCounts.of(engine).num_skipped for engine in self._engines)
        self._reports.write(found, step, found[0].num_batches * records_per_batch, skipped)

    def close(self, *, is_complete: bool) -> None:
        """Keep the totals, and restore the engines; idempotent.

        After a complete run measure the device's peak on the chief, unless a run on this machine has.
        """
        self._counting.close()
        instruments, self._instruments = self._instruments, None
        if instruments is None:
            return
        instruments.__exit__()
        if self._reports is not None:
            if is_complete:
                self._reports.finish(instruments.measured_peak)
            self._reports.keep()

    def _record(self, step: int, metrics: dict[str, Any]) -> None:
        self._train.report_metrics(GROUP, steps_completed=step, metrics=metrics)
        if self._sinks is not None:
            self._sinks.report_telemetry(step, metrics)

    def _keep(self, totals: Mapping[str, Any]) -> None:
        if isinstance(self._train, LocalTrainContext):
            self._train.note_telemetry(totals)


class TrainerTelemetry(LoopTelemetry):
    """Measures the chief of a DeepSpeed Trainer, at every line that the Trainer logs.

    A callback sees the steps, not their inside, and a Trainer's log has no exchange of ours: FLOPs are those of the chief's
    device. Waiting for data is the time between two steps, in which the Trainer also logs.
    """

    _began_s = 0.0
    _ended_s: float | None = None
    _num_tokens = 0.0

    def begin_step(self, trainer: Any, step: int) -> None:
        if self._is_on and self._instruments is None:
            engine = getattr(trainer, "model_wrapped", None)
            self._is_on = self._is_chief and isinstance(engine, DeepSpeedEngine)
            if self._is_on:
                self._open([engine], step)
        if self._instruments is None:
            return
        self._began_s = self._clock()
        if self._ended_s is not None:
            self._instruments.on_batch_loaded(None, self._began_s - self._ended_s)
            self._instruments.trained(self._began_s - self._ended_s)
        self._instruments.switch(True)
        self._count_first_batch()

    def end_step(self, step: int, num_tokens: float) -> None:
        if self._instruments is None:
            return
        self._instruments.switch(False)
        self._ended_s = self._clock()
        if self._is_first:
            self._is_first = False
            self._counting.close()
            self._instruments.end_first_batch(step, 0.0)
            self._num_tokens = num_tokens
        else:
            self._instruments.trained(self._ended_s - self._began_s)

    def pause(self) -> None:
        self._ended_s = None

    def report_log(self, step: int, num_tokens: float, train_batch_size: int) -> None:
        sample = self.sample(step)
        if sample is not None:
            tokens, self._num_tokens = round(num_tokens - self._num_tokens), num_tokens
            self.report([dataclasses.replace(sample, num_tokens=tokens or None)], step, train_batch_size)


class ReporterTelemetry(LoopTelemetry):
    """Measures all ranks of a ``Reporter`` loop; samples travel with its exchange.

    Waiting for data and FLOPs are known of loops over ``Reporter.batches`` only.
    """

    _has_loader = False
    _waited_s = 0.0

    def begin(self, engines: Sequence[DeepSpeedEngine], replica: int, batches_trained: int) -> None:
        if self._is_on:
            shares = int(engines[0].seq_dp_world_size) != int(engines[0].dp_world_size)
            self._open(engines, batches_trained, replica, shares_sequences=shares)
            self._switch(True)

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
        if self._instruments is not None:
            self._instruments.on_batch_loaded(micro_batch, self._waited_s)
            self._waited_s = 0.0
            self._switch(True)
            self._count_first_batch()

    def end_batch(self, batches_trained: int, seconds: float, *, pauses: bool) -> None:
        """Record the end of a batch, for a first one ``seconds`` after training began.

        ``pauses``: the script does something else than to train next.
        """
        if self._instruments is None:
            return
        # What it does before it asks for the next micro batch is no training, where it asks.
        self._switch(not (self._has_loader or pauses))
        if self._is_first:
            self._is_first = False
            self._counting.close()
            if not self._has_loader:
                self._instruments.without_loader()
            self._instruments.end_first_batch(batches_trained, seconds)

    def resume(self) -> None:
        """Record that training goes on, for scripts that draw records themselves."""
        if not self._has_loader:
            self._switch(True)

    def trained(self, seconds: float) -> None:
        """Add seconds of training since the last call."""
        if self._instruments is not None:
            self._instruments.trained(seconds)

    def _switch(self, is_training: bool) -> None:
        if self._instruments is not None:
            self._instruments.switch(is_training)
