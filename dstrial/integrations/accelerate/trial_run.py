"""``TrialRun``, to which ``Reporter`` delegates all calls from ``resume()`` on."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from determined import pytorch

from dstrial.config.deepspeed_source import MAIN_KEY
from dstrial.config.dotted_keys import dstrial_section, wants_system_metrics
from dstrial.config.merge import overwrite_deepspeed_config
from dstrial.errors import ConfigError, TrialContractError
from dstrial.integrations.accelerate.accelerator import (
    AcceleratorCheckpoint,
    epoch_length_of,
    prepared_engines,
    require_micro_batch,
    warn_of_unrepeatable_order,
)
from dstrial.integrations.accelerate.progress_tracker import ProgressTracker, RunSchedule
from dstrial.local.run_directory import TEST_VARIABLE
from dstrial.loggers.run_loggers import loggers_of
from dstrial.loop.callbacks import Callbacks
from dstrial.loop.checkpoint_loader import CheckpointLoader
from dstrial.loop.checkpoint_saver import CheckpointSaver
from dstrial.loop.metrics import MetricWindow, combine
from dstrial.loop.report_exchange import ReportExchange
from dstrial.loop.run_state import RunState
from dstrial.loop.sync_point import StopReason, SyncPoints
from dstrial.ranks.heartbeat import Phase, heartbeat
from dstrial.ranks.startup_phase import end_phases
from dstrial.resume.locate import asked_checkpoint, trial_id_of
from dstrial.resume.metadata import given_settings
from dstrial.telemetry.instruments import Instruments
from dstrial.trial.context import DeepSpeedTrialContext, runtime_of
from dstrial.trial.runtime import TrialRuntime

logger = logging.getLogger("dstrial.integrations.accelerate")


class TrialRun:
    """Resumes, reports, saves and stops the run of a ``Reporter``.

    Ranks: all, collectively, in every method.
    """

    def __init__(
        self,
        accelerator: Any,
        context: DeepSpeedTrialContext,
        info: Any,
        tracker: ProgressTracker,
        length: pytorch.TrainUnit | None,
    ) -> None:
        self._accelerator, self._context, self._info, self._tracker = accelerator, context, info, tracker
        runtime = self._runtime = runtime_of(context)
        self._core = runtime.core
        self._is_chief = bool(context.distributed.rank == 0)
        for engine_idx, engine in enumerate(prepared_engines(accelerator)):
            context.wrap_model_engine(engine)
            runtime.given_settings[engine_idx] = settings_as_given(runtime, engine_idx)
        self._steps = runtime.adapter.micro_batches_per_batch
        self._records_per_batch = runtime.train_batch_size
        accelerator.gradient_accumulation_steps = self._steps
        self._is_test = os.environ.get(TEST_VARIABLE) == "1"
        self._schedule = RunSchedule.from_config(
            runtime.exp_conf or {},
            global_batch_size=self._records_per_batch,
            length=length,
            is_test=self._is_test,
        )
        self._loggers = loggers_of(context)
        self._stack = contextlib.ExitStack()
        self._sync_points = SyncPoints(context.distributed, self._stop_request)
        self._window = MetricWindow("reporter.step")
        self._has_pending_random_states = False
        self._has_batch_to_finish = False
        self._heartbeat = heartbeat()
        self._has_trained = False
        trial_id = trial_id_of(info, is_mirrored=runtime.is_mirrored)
        callbacks = Callbacks({})
        state = RunState(
            AcceleratorCheckpoint(accelerator),
            context,
            callbacks,
            tracker.progress,
            self._window,
            trial_id,
        )
        self._loader = CheckpointLoader(state)
        self._saver = CheckpointSaver(state, in_background=self._schedule.saves_in_background)
        self._instruments = (
            Instruments(context.models, runtime.adapter.data_parallel_rank)
            if dstrial_section(runtime.exp_conf).get("telemetry") is not False
            else None
        )
        self._watch = LoopWatch(self._instruments)
        self._reports = ReportExchange(
            state, self._sync_points, self._saver, self._loggers.sinks, self._instruments
        )

    # ---- start and end -------------------------------------------------------------------------------

    def start(self) -> None:
        """Load the checkpoint if the run resumes; start reporting.

        Ranks: all, collectively.
        """
        checkpoint = asked_checkpoint(self._info, None, is_mirrored=self._runtime.is_mirrored)
        if checkpoint == "latest" and self._info is None:
            checkpoint = self._runtime.newest_checkpoint()
        self._tracker.begin(self._schedule, None if checkpoint is None else self._load(checkpoint))
        batches = self._tracker.batches_trained
        if self._runtime.kept_reports is not None:
            self._runtime.kept_reports.rewind_to(batches)
        if self._instruments is not None:
            self._stack.enter_context(self._instruments)
            self._instruments.begin(batches)
        self._stack.callback(self._watch.close)
        self._reports.open(
            self._stack,
            lambda start, end: (end - start) * self._records_per_batch,
            self._tracker.batches_total,
        )
        self._sync_points.start(batches)
        if wants_system_metrics(self._runtime.exp_conf) and not self._is_test:
            self._core.profiler.on()
        self._watch.begin()
        self._reports.start_clock()
        self._set_status("training")

    def _load(self, checkpoint: str) -> int | None:
        """Restore a checkpoint; return the checkpoint's number of batches per epoch.

        Returns None if the number is unknown, or if the checkpoint is another trial's, of which only the weights are loaded.
        """
        context = self._context
        loop_state, continues = self._loader.restore(checkpoint, None)
        self._accelerator.step = 0
        if not continues:
            return None
        if not self._accelerator.split_batches:
            now = self._runtime.adapter.micro_batch_size
            require_micro_batch(self._accelerator._dataloaders, micro_batch_before(self._runtime), now)
        self._reports.restore(loop_state)
        self._loader.restore_random_states()
        self._has_pending_random_states = True
        if self._is_chief:
            batches, num_ranks = self._tracker.batches_trained, context.distributed.size
            logger.info("resumed from checkpoint %s at batch %d on %d ranks", checkpoint, batches, num_ranks)
        epoch_length: int | None = loop_state.get("epoch_length")
        return epoch_length

    def end(self) -> None:
        """Save a last checkpoint; report that training is complete or stopped.

        Ranks: all, collectively.
        """
        tracker = self._tracker
        if tracker.batches_trained and not tracker.progress.checkpoint_is_current:
            self.save()
        self._saver.finish()
        self._reports.upload()
        self._reports.require_written()
        if not self._is_chief:
            return
        if tracker.stopped is not None:
            self._set_status(f"stopped: {tracker.stopped.value}")
            if self._info is not None:
                # Without the acknowledgement, the master takes exit code 0 for a complete trial.
                self._core.preempt.acknowledge_preemption_signal()
            return
        if tracker.batches_trained:
            self._reports.submit_progress()
            self._reports.writer.call(functools.partial(self._core.train.report_progress, 1.0))
        self._watch.close()
        self._set_status("completed")

    def close(self, *, has_failed: bool = False) -> None:
        """Wait for the save in the background; close the report writer and loggers.

        ``has_failed``: whether an exception ended the run, which the loggers then record as failed.
        """
        self._heartbeat.end()
        self._saver.close()
        try:
            self._stack.close()
        finally:
            is_stopped = self._tracker.stopped is not None
            self._loggers.end("failed" if has_failed else "stopped" if is_stopped else "completed")

    # ---- the loop ------------------------------------------------------------------------------------

    def batches(self, loader: Any) -> Iterator[Any]:
        tracker = self._tracker
        epoch_length = tracker.epoch_length = epoch_length_of(loader, self._steps)
        self._reports.batches_total = tracker.batches_total
        warn_of_unrepeatable_order(loader, is_chief=self._is_chief)
        while not tracker.is_over:
            epoch, done = divmod(tracker.batches_trained, epoch_length)
            this_epoch = self._accelerator.skip_first_batches(loader, done * self._steps) if done else loader
            this_epoch.set_epoch(epoch)
            num_left = (epoch_length - done) * self._steps
            self._heartbeat.begin(Phase.BATCH, tracker.batches_trained)
            for idx, item in enumerate(self._watch.watched(this_epoch)):
                if idx >= num_left:
                    continue  # drop the micro batches of an incomplete batch, but read them, so that the loader ends normally
                if self._has_pending_random_states:
                    # Iterating over the loader anew has drawn random numbers that the uninterrupted run did not draw here.
                    self._loader.restore_random_states()
                    self._has_pending_random_states = False
                self._watch.begin_micro_batch(item)
                yield item
                if self._between_batches():
                    break
        self._heartbeat.end()  # the script may run for any time after training; the launcher must not report a stall

    def step(self, metrics: Mapping[str, Any] | None) -> bool:
        if metrics:
            self._window.add(metrics)
        if not self._accelerator.sync_gradients:
            return False
        accelerator = self._accelerator
        if self._steps > 1 and not accelerator.step and not accelerator.gradient_state.end_of_dataloader:
            raise TrialContractError(
                f"the loop does not call accelerator.accumulate, and a batch has {self._steps} micro batches per rank: each "
                "would be an optimizer step; expected one step per batch. Put the micro batch into `with "
                "accelerator.accumulate(model):`."
            )
        batches = self._tracker.advance()
        if not self._has_trained:
            self._has_trained = True
            end_phases()
            if self._runtime.stop_signals is not None:
                self._runtime.stop_signals.listen()
        self._has_batch_to_finish = True
        self._watch.end_batch(batches, self._reports.elapsed_s, pauses=self._tracker.needs_validation)
        is_single_rank = self._sync_points.is_single_rank and self._sync_points.is_stop_requested()
        if self._tracker.is_anything_due or batches >= self._sync_points.next_batch or is_single_rank:
            self._exchange()
        # Now the script validates, if a validation is due, or runs other code until it requests the next micro batch.
        next_phase = Phase.VALIDATION if self._tracker.needs_validation else Phase.SCRIPT
        self._heartbeat.begin(next_phase, batches)
        return True

    def _exchange(self) -> None:
        """Exchange stop requests and, if due, metrics. Ranks: all, collectively."""
        tracker = self._tracker
        reports = tracker.is_report_due or (tracker.is_at_end and self._reports.has_unreported)
        stop = self._reports.exchange(reports=reports)
        if stop is not None and not tracker.is_at_end:
            tracker.stopped = stop
            if self._is_chief:
                logger.warning(
                    "stopping after batch %d (%s), with a checkpoint", tracker.batches_trained, stop.value
                )

    def _between_batches(self) -> bool:
        """Save a checkpoint if due; return whether training is over.

        A no-op that returns False, unless a batch has ended since the last call. Ranks: all, collectively.
        """
        if not self._has_batch_to_finish:
            return False
        self._has_batch_to_finish = False
        if self._tracker.needs_checkpoint:
            self.save()
        if self._tracker.pauses_training:
            self._sync_points.start(self._tracker.batches_trained)
            self._reports.start_clock()
        self._heartbeat.begin(Phase.BATCH, self._tracker.batches_trained)
        return self._tracker.is_over

    # ---- reports and checkpoints ---------------------------------------------------------------------

    def report_training(self, metrics: Mapping[str, Any]) -> None:
        averages = self._mean_over_ranks(metrics, "report_training")
        if self._is_chief:
            self._reports.submit_training(self._tracker.batches_trained, averages)

    def report_validation(self, metrics: Mapping[str, Any]) -> None:
        averages = self._mean_over_ranks(metrics, "report_validation")
        schedule, progress = self._schedule, self._tracker.progress
        saves = self._reports.report_validation(
            averages,
            epochs=self._tracker.epoch_idx,
            policy=schedule.checkpoint_policy,
            searcher_metric=schedule.metric,
            smaller_is_better=schedule.smaller_is_better,
        )
        if saves and not progress.checkpoint_is_current:
            self.save()
        self._watch.resume()
        self._reports.start_clock()
        if self._heartbeat.phase is Phase.VALIDATION:
            self._heartbeat.begin(Phase.SCRIPT, progress.batches_trained)

    def _mean_over_ranks(self, metrics: Mapping[str, Any], where: str) -> dict[str, Any]:
        own = MetricWindow(where)
        own.add(metrics)
        return dict(combine(self._core.distributed.allgather(own.totals()), where))

    def save(self) -> str:
        self._set_status("checkpointing")
        phase_before, batches = self._heartbeat.phase, self._tracker.batches_trained
        self._heartbeat.begin(Phase.SAVE, batches)
        self._reports.require_written()
        uuid = self._saver.save({**self._reports.state(), "epoch_length": self._tracker.epoch_length})
        self._heartbeat.begin(phase_before, batches)
        self._reports.start_clock()
        self._set_status("training")
        return uuid

    def _set_status(self, status: str) -> None:
        if self._is_chief:
            self._core.train.set_status(status)

    def _stop_request(self) -> StopReason | None:
        # auto_ack=False, because `end` acknowledges the preemption, only if training has ended early.
        if self._info is not None and self._is_chief and self._core.preempt.should_preempt(auto_ack=False):
            return StopReason.PREEMPTED
        signals = self._runtime.stop_signals
        return StopReason.SIGNAL if signals is not None and signals.requested is not None else None


class LoopWatch:
    """Measures a rank's batches, without the script's pauses for validation.

    FLOPs and the wait for data are measured only in loops over ``Reporter.batches``. If ``instruments`` is None, nothing is
    measured.
    """

    def __init__(self, instruments: Instruments | None) -> None:
        self._instruments = instruments
        self._counting = contextlib.ExitStack()
        self._is_first, self._is_counting = True, False
        self._has_loader = False
        self._waited_s = 0.0

    def begin(self) -> None:
        self._switch(True)

    def watched(self, micro_batches: Iterable[Any]) -> Iterator[Any]:
        """Yield a loader's micro batches; measure how long the rank waits for each."""
        found, ended = iter(micro_batches), object()
        self._has_loader = True
        while True:
            began_s = time.perf_counter()
            micro_batch = next(found, ended)
            self._waited_s += time.perf_counter() - began_s
            if micro_batch is ended:
                return
            yield micro_batch

    def begin_micro_batch(self, micro_batch: Any) -> None:
        if self._instruments is None:
            return
        self._instruments.on_batch_loaded(micro_batch, self._waited_s)
        self._waited_s = 0.0
        self._switch(True)
        if self._is_first and not self._is_counting:
            self._is_counting = True
            self._counting.enter_context(self._instruments.counting())

    def end_batch(self, batches_trained: int, seconds: float, *, pauses: bool) -> None:
        """Record the end of a batch.

        ``seconds``, the batch's duration, is recorded only for the first batch. ``pauses``: whether a validation follows, which
        is not measured.
        """
        if self._instruments is None:
            return
        # In a loop over Reporter.batches, training resumes with the next micro batch.
        self._switch(not (self._has_loader or pauses))
        if self._is_first:
            self._is_first = False
            self._counting.close()
            if not self._has_loader:
                self._instruments.without_loader()
            self._instruments.end_first_batch(batches_trained, seconds)

    def resume(self) -> None:
        """Resume measuring after a validation.

        A no-op in a loop over ``Reporter.batches``, where the next micro batch resumes measuring.
        """
        if not self._has_loader:
            self._switch(True)

    def _switch(self, is_training: bool) -> None:
        if self._instruments is not None:
            self._instruments.switch(is_training)

    def close(self) -> None:
        """Stop counting FLOPs, also if the first batch never ended. Idempotent."""
        self._counting.close()


def settings_as_given(runtime: TrialRuntime, engine_idx: int) -> dict[str, Any]:
    """Return settings of an engine's DeepSpeed config before Accelerate's changes.

    The settings are those that checkpoints record as ``EngineRecord.given``. Accelerate replaces "auto" in the engine's config
    by numbers; the result has no numbers for such settings.
    """
    given = runtime.given_hparams or {}
    source = given.get(MAIN_KEY)
    own: dict[str, Any] = runtime.given_settings[engine_idx]
    if engine_idx or not isinstance(source, (str, Mapping)):
        return own
    try:
        merged = overwrite_deepspeed_config(
            source if isinstance(source, str) else dict(source),
            dict(given.get("overwrite_deepspeed_args") or {}),
        )
    except ConfigError:
        return own
    kinds = {key: value for key, value in own.items() if isinstance(value, str)}
    return {**kinds, **given_settings(merged)}


def micro_batch_before(runtime: TrialRuntime) -> int | None:
    """Return the micro batch size of the run's checkpoint; None for a new run."""
    resumed = runtime.resumed
    return None if resumed is None or not resumed.saved.engines else resumed.saved.engines[0].micro_batch_size
