"""Telemetry of a Trainer's run, at every line that the Trainer logs.

A callback sees the steps, not their inside, and a Trainer's log has no exchange of ours that numbers could travel with: the
chief measures itself alone, and FLOPs are those of its device. Waiting for data is the time between two steps, in which the
Trainer also logs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

from deepspeed import DeepSpeedEngine
from determined import core

from dstrial.config.dotted_keys import dstrial_section
from dstrial.engine.finite_weights import StepCounts
from dstrial.local.mirror import MirroredTrainContext
from dstrial.local.train_context import LocalTrainContext
from dstrial.telemetry.instruments import Instruments
from dstrial.telemetry.reporting import TelemetryReports
from dstrial.telemetry.samples import GROUP


class TrainerTelemetry:
    """Measures a DeepSpeed Trainer on the chief, without communication; else a no-op."""

    def __init__(
        self,
        context: core.Context,
        exp_conf: Mapping[str, Any] | None,
        *,
        is_off: bool,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        asked = dstrial_section(exp_conf).get("telemetry")
        self._is_on = not is_off and asked is not False and context.distributed.rank == 0
        self._train = context.train
        self._clock = clock
        self._instruments: Instruments | None = None
        self._reports: TelemetryReports | None = None
        self._counting = contextlib.ExitStack()
        self._is_first = True
        self._began_s = 0.0
        self._ended_s: float | None = None
        self._num_tokens = 0.0

    def begin_step(self, trainer: Any, step: int) -> None:
        if not self._is_on:
            return
        if self._instruments is None and not self._open(trainer, step):
            self._is_on = False
            return
        assert self._instruments is not None
        now_s = self._clock()
        if self._ended_s is not None:
            self._instruments.drew(None, now_s - self._ended_s)
            self._instruments.trained(now_s - self._ended_s)
        self._began_s = now_s
        self._instruments.switch(True)
        if self._is_first:
            self._counting.enter_context(self._instruments.counting())

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

    def report(self, step: int, num_tokens: float, train_batch_size: int) -> None:
        if self._instruments is None or self._reports is None:
            return
        sample = self._instruments.sample(step).wait()
        tokens, self._num_tokens = round(num_tokens - self._num_tokens), num_tokens
        sample = dataclasses.replace(sample, num_tokens=tokens or None)
        skipped = StepCounts.of(self._engine).num_skipped
        self._reports.write([sample], step, sample.num_batches * train_batch_size, skipped)

    def close(self, *, is_complete: bool) -> None:
        """Keep the totals, and restore the engine; idempotent."""
        self._counting.close()
        instruments, self._instruments = self._instruments, None
        if instruments is None or self._reports is None:
            return
        instruments.__exit__()
        if is_complete:
            self._reports.finish(instruments.measured_peak)
        self._reports.keep()

    def _open(self, trainer: Any, step: int) -> bool:
        engine = getattr(trainer, "model_wrapped", None)
        if not isinstance(engine, DeepSpeedEngine):
            return False
        self._engine = engine
        self._instruments = Instruments([engine], 0)
        self._instruments.__enter__()
        self._instruments.begin(step)
        self._reports = TelemetryReports(self._record, self._keep, self._instruments.known_peak())
        return True

    def _record(self, step: int, metrics: dict[str, Any]) -> None:
        self._train.report_metrics(GROUP, steps_completed=step, metrics=metrics)

    def _keep(self, totals: Mapping[str, Any]) -> None:
        if isinstance(self._train, (LocalTrainContext, MirroredTrainContext)):
            self._train.note_telemetry(totals)
