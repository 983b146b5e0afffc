"""The run behind a ``Reporter``: from the checkpoint resumed to the last written."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

from determined import pytorch, util

from dstrial.config import overwrite_deepspeed_config
from dstrial.config.deepspeed_source import MAIN_KEY
from dstrial.config.dotted_keys import wants_system_metrics
from dstrial.errors import ConfigError, TrialContractError
from dstrial.integrations.accelerate.accelerator_checkpoint import AcceleratorCheckpoint, prepared_engines
from dstrial.integrations.accelerate.loaders import (
    epoch_length_of,
    length_of,
    require_equal_lengths,
    require_micro_batch,
    warn_of_unrepeatable_order,
)
from dstrial.integrations.accelerate.progress_tracker import ProgressTracker, RunSchedule
from dstrial.integrations.loop_telemetry import ReporterTelemetry
from dstrial.local.measuring_variables import is_measuring
from dstrial.local.run_directory import TEST_VARIABLE
from dstrial.loggers.run_loggers import loggers_of
from dstrial.loop.boundaries import asks_for_checkpoint
from dstrial.loop.callbacks import Callbacks
from dstrial.loop.checkpoint_loader import CheckpointLoader
from dstrial.loop.checkpoint_saver import CheckpointSaver
from dstrial.loop.metric_sinks import MetricSinks
from dstrial.loop.metrics import MetricTotals, MetricWindow, combine
from dstrial.loop.run_state import RunState
from dstrial.loop.sync_point import StopReason, SyncPoints
from dstrial.ranks.heartbeat import Phase, heartbeat
from dstrial.ranks.startup_phase import end_phases
from dstrial.resume.locate import trial_id_of
from dstrial.resume.metadata import RESUME_VARIABLE, given_settings
from dstrial.telemetry.samples import RankSample
from dstrial.trial.context import DeepSpeedTrialContext, runtime_of
from dstrial.trial.runtime import TrialRuntime

logger = logging.getLogger("dstrial.integrations.accelerate")


class TrialRun:
    """Trains, reports, saves and stops, all ranks together, once all is prepared."""

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
        self._plan = RunSchedule.from_config(
            runtime.exp_conf or {},
            global_batch_size=self._records_per_batch,
            length=length,
            is_test=self._is_test,
        )
        self._loggers = loggers_of(context)
        self._sinks = MetricSinks(context, self._loggers.sinks)
        measures = is_measuring(runtime.hparams or {})
        self._telemetry = ReporterTelemetry(self._core, runtime.exp_conf, is_off=measures, sinks=self._sinks)
        self._sync_points = SyncPoints(context.distributed, self._stop_request)
        self._window = MetricWindow("reporter.step")
        self._window_start = 0
        self._window_seconds = 0.0
        self._mark_s = 0.0
        self._has_pending_random_states = False
        self._has_batch_to_finish = False
        self._heartbeat = heartbeat()
        self._has_trained = False
        trial_id = trial_id_of(info, is_mirrored=runtime.is_mirrored)
        state = RunState(
            AcceleratorCheckpoint(accelerator),
            context,
            Callbacks({}),
            tracker.progress,
            self._window,
            trial_id,
        )
        self._loader = CheckpointLoader(state)
        self._saver = CheckpointSaver(state, in_background=self._plan.saves_in_background)

    # ---- start and end -------------------------------------------------------------------------------

    def start(self) -> None:
        """Load the checkpoint, if any, and open everything. Ranks: all, collectively."""
        checkpoint = checkpoint_to_resume(self._runtime, self._info)
        self._tracker.begin(self._plan, None if checkpoint is None else self._load(checkpoint))
        batches = self._tracker.batches_trained
        if self._runtime.kept_reports is not None:
            self._runtime.kept_reports.rewind_to(batches)
        self._sinks.open()
        self._sync_points.start(batches)
        if wants_system_metrics(self._runtime.exp_conf) and not self._is_test:
            self._core.profiler.on()
        replica = self._runtime.adapter.data_parallel_rank
        self._telemetry.begin(self._context.models, replica, batches)
        self._mark_s = time.monotonic()
        self._set_status("training")

    def _load(self, checkpoint: str) -> int | None:
        """Restore a checkpoint; return its batches of an epoch, if it knows them."""
        context = self._context
        loop_state, continues = self._loader.restore(checkpoint, None)
        self._accelerator.step = 0
        if not continues:
            return None
        if not self._accelerator.split_batches:
            now = self._runtime.adapter.micro_batch_size
            require_micro_batch(self._accelerator._dataloaders, micro_batch_before(self._runtime), now)
        self._window_start = int(loop_state.get("window_start", self._tracker.batches_trained))
        self._window_seconds = float(loop_state.get("window_seconds", 0.0))
        self._loader.restore_random_states()
        self._has_pending_random_states = True
        if self._is_chief:
            batches, num_ranks = self._tracker.batches_trained, context.distributed.size
            logger.info("resumed from checkpoint %s at batch %d on %d ranks", checkpoint, batches, num_ranks)
        epoch_length: int | None = loop_state.get("epoch_length")
        return epoch_length

    def end(self) -> None:
        """Save the rest, wait for it, report how training ended. Ranks: all, collectively."""
        tracker = self._tracker
        if tracker.batches_trained and not tracker.progress.checkpoint_is_current:
            self.save()
        self._saver.finish()
        self._sinks.upload()
        if not self._is_chief:
            return
        if tracker.stopped is not None:
            self._set_status(f"stopped: {tracker.stopped.value}")
            if self._info is not None:
                # To the master, exit code 0 without this means that the trial is complete.
                self._core.preempt.acknowledge_preemption_signal()
            return
        if tracker.batches_trained:
            self._report_progress()
            self._core.train.report_progress(1.0)
        self._telemetry.close(is_complete=True)
        self._set_status("completed")

    def close(self, *, has_failed: bool = False) -> None:
        """Abandon a save that is under way, and end sinks and loggers."""
        self._heartbeat.end()
        self._saver.close()
        self._telemetry.close(is_complete=False)
        self._sinks.close()
        is_stopped = self._tracker.stopped is not None
        self._loggers.end("failed" if has_failed else "stopped" if is_stopped else "completed")

    # ---- the loop ------------------------------------------------------------------------------------

    def batches(self, loader: Any) -> Iterator[Any]:
        tracker = self._tracker
        require_equal_lengths(self._context.distributed.allgather(length_of(loader)))
        epoch_length = tracker.epoch_length = epoch_length_of(loader, self._steps)
        warn_of_unrepeatable_order(loader, is_chief=self._is_chief)
        while not tracker.is_over:
            epoch, done = divmod(tracker.batches_trained, epoch_length)
            this_epoch = self._accelerator.skip_first_batches(loader, done * self._steps) if done else loader
            this_epoch.set_epoch(epoch)
            num_left = (epoch_length - done) * self._steps
            self._heartbeat.begin(Phase.BATCH, tracker.batches_trained)
            for idx, item in enumerate(self._telemetry.watched(this_epoch)):
                if idx >= num_left:
                    continue  # of a batch that is not whole; the loader comes to its own end
                if self._has_pending_random_states:
                    # Starting the loader has drawn random numbers that the uninterrupted run did not draw.
                    self._loader.restore_random_states()
                    self._has_pending_random_states = False
                self._telemetry.begin_micro_batch(item)
                yield item
                if self._between_batches():
                    break
        self._heartbeat.end()  # what the script does with a trained model is its own

    def step(self, metrics: Mapping[str, Any] | None) -> bool:
        if metrics:
            self._window.add(metrics)
        if not self._accelerator.sync_gradients:
            return False
        batches = self._tracker.advance()
        if not self._has_trained:
            self._has_trained = True
            end_phases()
            if self._runtime.stop_signals is not None:
                self._runtime.stop_signals.listen()
        self._has_batch_to_finish = True
        trained_s = time.monotonic() - self._mark_s
        self._telemetry.end_batch(batches, trained_s, pauses=self._tracker.needs_validation)
        is_single_rank = self._sync_points.is_single_rank and self._sync_points.is_stop_requested()
        if self._tracker.is_anything_due or batches >= self._sync_points.next_batch or is_single_rank:
            self._exchange()
        # Until the next micro batch is asked for, the script does what only it knows, unless that is to validate.
        next_phase = Phase.VALIDATION if self._tracker.needs_validation else Phase.SCRIPT
        self._heartbeat.begin(next_phase, batches)
        return True

    def _exchange(self) -> None:
        """Agree on stopping, report metrics, settle the save. Ranks: all, collectively."""
        tracker, batches = self._tracker, self._tracker.batches_trained
        reports = tracker.is_report_due or (tracker.is_at_end and batches > self._window_start)
        share = self._window.totals().pack() if reports and len(self._window) else None
        trained_s = time.monotonic() - self._mark_s
        self._window_seconds += trained_s
        self._telemetry.trained(trained_s)
        sample = self._telemetry.sample(batches) if reports else None
        packed = None if sample is None else sample.pack()
        agreement = self._sync_points.agree(batches, (share, self._saver.status(), packed))
        self._saver.settle([status for _, status, _ in agreement.shares])
        if reports:
            shares = [share and MetricTotals.unpack(share) for share, _, _ in agreement.shares]
            averages = combine(shares, "reporter.step")
            if self._is_chief:
                metrics = dict(averages)
                per_second = (batches - self._window_start) / max(self._window_seconds, 1e-9)
                metrics.setdefault("batches_per_second", per_second)
                metrics.setdefault("samples_per_second", per_second * self._records_per_batch)
                self._send_training(metrics)
                samples = [packed and RankSample.unpack(packed) for _, _, packed in agreement.shares]
                self._telemetry.report(samples, batches, self._records_per_batch)
            self._sinks.upload(at_once=False)
            self._window.reset()
            self._window_seconds = 0.0
            self._window_start = batches
        if self._is_chief:
            self._report_progress()
        self._mark_s = time.monotonic()
        if agreement.stop is not None and not tracker.is_at_end:
            tracker.stopped = agreement.stop
            if self._is_chief:
                logger.warning(
                    "stopping after batch %d (%s), with a checkpoint", batches, agreement.stop.value
                )

    def _between_batches(self) -> bool:
        """Save what is due after a batch; return whether training is over. Ranks: all."""
        if not self._has_batch_to_finish:
            return False
        self._has_batch_to_finish = False
        if self._tracker.needs_checkpoint:
            self.save()
        if self._tracker.pauses_training:
            self._sync_points.start(self._tracker.batches_trained)
            self._mark_s = time.monotonic()
        self._heartbeat.begin(Phase.BATCH, self._tracker.batches_trained)
        return self._tracker.is_over

    # ---- reports and checkpoints ---------------------------------------------------------------------

    def report_training(self, metrics: Mapping[str, Any]) -> None:
        averages = self._mean_over_ranks(metrics, "report_training")
        if self._is_chief:
            self._send_training(averages)

    def report_validation(self, metrics: Mapping[str, Any]) -> None:
        averages = self._mean_over_ranks(metrics, "report_validation")
        self._require_searcher_metric(averages)
        progress = self._tracker.progress
        progress.last_validation = progress.batches_trained
        saves = self._is_chief and self._send_validation(averages)
        self._sinks.upload()
        if self._context.distributed.broadcast(saves) and not progress.checkpoint_is_current:
            self.save()
        self._telemetry.resume()
        self._mark_s = time.monotonic()
        if self._heartbeat.phase is Phase.VALIDATION:
            self._heartbeat.begin(Phase.SCRIPT, progress.batches_trained)

    def _mean_over_ranks(self, metrics: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Return each metric's mean; ``where`` names the method. Ranks: all, collectively."""
        own = MetricWindow(where)
        own.add(metrics)
        return dict(combine(self._core.distributed.allgather(own.totals()), where))

    def _require_searcher_metric(self, metrics: Mapping[str, Any]) -> None:
        """Refuse validation metrics that the searcher cannot compare."""
        searched = self._plan.metric
        if searched is None or searched in ("batches", "epochs"):
            return
        if not util.is_numerical_scalar(metrics.get(searched)):
            raise TrialContractError(
                f"the searcher's metric {searched!r} is {metrics.get(searched)!r} in reporter.report_validation; expected one "
                f"number among {sorted(metrics)}. Report it, or set searcher.metric to one of them."
            )

    def _send_training(self, metrics: dict[str, Any]) -> None:
        batches = self._tracker.batches_trained
        self._core.train.report_training_metrics(steps_completed=batches, metrics=metrics)
        self._sinks.report("training", batches, metrics)

    def _send_validation(self, metrics: Mapping[str, Any]) -> bool:
        """Report validation metrics on rank 0; return whether to save a checkpoint."""
        plan, train, batches = self._plan, self._core.train, self._tracker.batches_trained
        is_best = plan.checkpoint_policy == "best"
        best_before = train.get_experiment_best_validation() if is_best else None
        self._sinks.report("validation", batches, metrics)
        reported = {"batches": batches, "epochs": self._tracker.epoch_idx, **metrics}
        train.report_validation_metrics(steps_completed=batches, metrics=reported)
        now = reported.get(str(plan.metric))
        return asks_for_checkpoint(
            plan.checkpoint_policy, now, best_before, smaller_is_better=plan.smaller_is_better
        )

    def _report_progress(self) -> None:
        batches, total = self._tracker.batches_trained, self._tracker.batches_total
        if total is None:
            return
        if self._runtime.kept_reports is not None:
            self._runtime.kept_reports.report_batches(batches, total)
        self._core.train.report_progress(min(batches / total, 1.0))

    def save(self) -> str:
        self._set_status("checkpointing")
        phase_before, batches = self._heartbeat.phase, self._tracker.batches_trained
        self._heartbeat.begin(Phase.SAVE, batches)
        uuid = self._saver.save(
            {
                "window_seconds": self._window_seconds,
                "window_start": self._window_start,
                "epoch_length": self._tracker.epoch_length,
            }
        )
        self._heartbeat.begin(phase_before, batches)
        self._mark_s = time.monotonic()
        self._set_status("training")
        return uuid

    def _set_status(self, status: str) -> None:
        if self._is_chief:
            self._core.train.set_status(status)

    def _stop_request(self) -> StopReason | None:
        # Acknowledged at the end, and only if training ends early.
        if self._info is not None and self._is_chief and self._core.preempt.should_preempt(auto_ack=False):
            return StopReason.PREEMPTED
        signals = self._runtime.stop_signals
        return StopReason.SIGNAL if signals is not None and signals.requested is not None else None


def checkpoint_to_resume(runtime: TrialRuntime, info: Any) -> str | None:
    """Return the checkpoint of a resumed run; None for a new one."""
    asked = os.environ.get(RESUME_VARIABLE)
    if info is not None:
        latest: str | None = info.latest_checkpoint
        return latest or (asked if runtime.is_mirrored else None)
    return runtime.newest_checkpoint() if asked == "latest" else asked or None


def settings_as_given(runtime: TrialRuntime, engine_idx: int) -> dict[str, Any]:
    """Return an engine's settings before Accelerate has solved them."""
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
    """Return the micro batch of this very run's checkpoint; None for a new run."""
    resumed = runtime.resumed
    return None if resumed is None or not resumed.saved.engines else resumed.saved.engines[0].micro_batch_size
