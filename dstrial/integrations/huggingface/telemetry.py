"""Telemetry of a Trainer's rank 0, reported with each training log entry."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Mapping
from typing import Any

from deepspeed import DeepSpeedEngine
from determined import core

from dstrial.config.dotted_keys import dstrial_section
from dstrial.local.run_directory import TELEMETRY_GROUP
from dstrial.local.train_context import LocalTrainContext
from dstrial.loop.non_finite import StepCounts
from dstrial.telemetry.instruments import Instruments, TelemetryReports


class TrainerTelemetry:
    """Measures time, memory and FLOPs of rank 0 of a Trainer with DeepSpeed.

    Other ranks are not measured. The time between two steps, in which the Trainer also logs, counts as waiting for data.
    Nothing is measured if ``data.dstrial.telemetry`` is false.
    """

    def __init__(self, core_context: core.Context, exp_conf: Mapping[str, Any] | None) -> None:
        is_asked = dstrial_section(exp_conf).get("telemetry") is not False
        self._is_on = is_asked and core_context.distributed.rank == 0
        self._train = core_context.train
        self._engine: DeepSpeedEngine | None = None
        self._instruments: Instruments | None = None
        self._reports: TelemetryReports | None = None
        self._counting = contextlib.ExitStack()
        self._is_first, self._is_counting = True, False
        self._began_s = 0.0
        self._ended_s: float | None = None
        self._num_tokens = 0.0

    def _open(self, engine: DeepSpeedEngine, step: int) -> None:
        self._engine = engine
        self._instruments = Instruments([engine], replica=0)
        self._instruments.__enter__()
        self._instruments.begin(step)
        self._reports = TelemetryReports(self._record, self._keep, self._instruments.peak_flops_per_s)

    def begin_step(self, trainer: Any, step: int) -> None:
        if self._is_on and self._instruments is None:
            engine = getattr(trainer, "model_wrapped", None)
            self._is_on = isinstance(engine, DeepSpeedEngine)
            if self._is_on:
                self._open(engine, step)
        if self._instruments is None:
            return
        self._began_s = time.perf_counter()
        if self._ended_s is not None:
            self._instruments.on_batch_loaded(None, self._began_s - self._ended_s)
            self._instruments.trained(self._began_s - self._ended_s)
        self._instruments.switch(True)
        if self._is_first and not self._is_counting:
            self._is_counting = True
            self._counting.enter_context(self._instruments.counting())

    def end_step(self, step: int, num_tokens: float) -> None:
        if self._instruments is None:
            return
        self._instruments.switch(False)
        self._ended_s = time.perf_counter()
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
        if self._instruments is None or self._reports is None:
            return
        tokens, self._num_tokens = round(num_tokens - self._num_tokens), num_tokens
        sample = dataclasses.replace(self._instruments.sample(step).wait(), num_tokens=tokens or None)
        skipped = StepCounts.of(self._engine).num_skipped
        self._reports.write([sample], step, sample.num_batches * train_batch_size, skipped)

    def close(self) -> None:
        """Store the run's totals and remove the engine's hooks. Idempotent."""
        self._counting.close()
        instruments, self._instruments = self._instruments, None
        if instruments is None:
            return
        instruments.__exit__()
        if self._reports is not None:
            self._reports.keep()

    def _record(self, step: int, metrics: dict[str, Any]) -> None:
        self._train.report_metrics(TELEMETRY_GROUP, steps_completed=step, metrics=metrics)

    def _keep(self, totals: Mapping[str, Any]) -> None:
        if isinstance(self._train, LocalTrainContext):
            self._train.note_telemetry(totals)
