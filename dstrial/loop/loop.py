"""The training loop: draws batches and does what is due, with any engine."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from determined import pytorch

from dstrial.engine.engine_hooks import LostGradientCheck, observe_engines
from dstrial.engine.finite_weights import FiniteWeights, StepCounts
from dstrial.errors import CheckpointError, DataError, NonFiniteError, RankError, TrialContractError
from dstrial.loop.boundaries import (
    Boundary,
    Period,
    Progress,
    due,
    next_due,
    total_batches,
)
from dstrial.loop.callbacks import Callbacks
from dstrial.loop.checkpoint_loader import CheckpointLoader
from dstrial.loop.checkpoint_saver import CheckpointSaver
from dstrial.loop.data.training import CountingIterator, TrainingStream, agreed_epoch_length
from dstrial.loop.data.validation import ValidationStream
from dstrial.loop.metric_sinks import MetricSink, MetricSinks
from dstrial.loop.metrics import MetricTotals, MetricWindow, as_mapping
from dstrial.loop.non_finite import NonFiniteGuard, StateEvidence, lost_weight, unsafe_to_save_reason
from dstrial.loop.report_exchange import Exchange, ReportExchange, step_counts
from dstrial.loop.run_state import RunState
from dstrial.loop.settings import FitResult, LoopSettings
from dstrial.loop.sync_point import StopReason, SyncPoints
from dstrial.loop.validation import Validation
from dstrial.ranks.heartbeat import Phase, heartbeat
from dstrial.ranks.startup_phase import FIRST_BATCH, TRAINING, begin_phase
from dstrial.telemetry.instruments import Instruments
from dstrial.trial.context import DeepSpeedTrialContext, runtime_of
from dstrial.trial.determined_errors import AccumulationError, InvalidTrialError
from dstrial.trial.trial import DeepSpeedTrial

logger = logging.getLogger("dstrial.loop")


@contextlib.contextmanager
def exits_refused(where: Callable[[], str]) -> Iterator[None]:
    """Turn user code's ``sys.exit(0)``, which looks like the end, into an error."""
    try:
        yield
    except SystemExit as exit_:
        if type(exit_) is not SystemExit or exit_.code:  # dsat ends what it measures by a subclass
            raise
        raise TrialContractError(
            f"user code ends the rank with exit code 0 {where()}; expected training to go on to its end. To stop it early, call "
            "context.set_stop_requested(True) or exit with another code."
        ).with_traceback(exit_.__traceback__) from None


class TrainingLoop:
    """Trains one trial once.

    Args:
        stop_request: returns this rank's reason to stop, or None; called on every rank.
        on_start: called on every rank with the batches trained, after a checkpoint was loaded or none was.
        on_progress: called with the finished batches and the total on the chief at points of agreement.
        on_steps: called with the optimizer steps of the run and the skipped ones on the chief, at reports with skipped steps
            and at the end.
    """

    def __init__(
        self,
        trial: DeepSpeedTrial,
        context: DeepSpeedTrialContext,
        settings: LoopSettings,
        stop_request: Callable[[], StopReason | None],
        on_start: Callable[[int], None],
        on_progress: Callable[[int, int], None],
        on_steps: Callable[[int, int], None] = lambda _steps, _skipped: None,
        *,
        metric_sinks: Sequence[MetricSink] = (),
    ) -> None:
        require_engine(trial, context)
        self._trial = trial
        self._context = context
        self._runtime = runtime_of(context)
        self._settings = settings
        self._core = self._runtime.core
        self._distributed = context.distributed
        self._is_chief = context.distributed.rank == 0
        self._adapter = self._runtime.adapter
        self._callbacks = Callbacks(trial.build_callbacks())
        keep_batches = self._callbacks.overrides("on_training_workload_end")
        self._window = MetricWindow(
            "train_batch", keep_batches=keep_batches, watches_losses=settings.checks.non_finite != "ignore"
        )
        self._progress = Progress(epoch_length=None)
        self._sync_points = SyncPoints(context.distributed, stop_request)
        self._on_start = on_start
        self._on_steps = on_steps
        self._weights: FiniteWeights | None = None
        self._guard: NonFiniteGuard | None = None
        self._is_skipping_save = False
        self._periods = {
            Boundary.REPORT: Period.from_train_unit(settings.reporting_period),
            Boundary.VALIDATE: _optional_period(settings.validation_period),
            Boundary.CHECKPOINT: _optional_period(settings.checkpoint_period),
        }
        state = RunState(trial, context, self._callbacks, self._progress, self._window, settings.trial_id)
        self._loader = CheckpointLoader(state)
        self._saver = CheckpointSaver(state, in_background=settings.saves_in_background)
        self._instruments = (
            Instruments(context.models, self._adapter.data_parallel_rank, count_tokens=trial.get_num_tokens)
            if settings.has_telemetry
            else None
        )
        self._reports = ReportExchange(
            context,
            self._callbacks,
            self._progress,
            self._window,
            self._sync_points,
            self._saver,
            MetricSinks(context, metric_sinks),
            on_progress,
            self._judge,
            self._instruments,
        )
        self._stream: TrainingStream | None = None
        self._validation: Validation | None = None
        self._iterator: CountingIterator | None = None
        self._batches_total = 0
        self._checkpoint_uuid: str | None = None
        self._reports_metrics = self._runtime.mpu.should_report_metrics
        self._is_first_batch = True
        self._heartbeat = heartbeat()

    # ---- the run -------------------------------------------------------------------------------------

    def run(self) -> FitResult:
        """Train to the end, or until all ranks agree to stop. Ranks: all, collectively."""
        settings, callbacks, progress = self._settings, self._callbacks, self._progress
        with contextlib.ExitStack() as stack:
            stack.enter_context(
                exits_refused(lambda: f"at batch {progress.batches_trained} of {self._batches_total}")
            )
            callbacks.call("on_trial_startup", self._context.get_initial_batch(), settings.latest_checkpoint)
            stack.callback(callbacks.call, "on_trial_shutdown")
            stack.callback(self._saver.close)
            stack.callback(self._close_iterator)
            stack.callback(self._heartbeat.end)
            self._build_loaders()
            self._batches_total = total_batches(settings.max_length, progress.epoch_length)
            self._require_epoch_length()
            loop_state = self._restore()
            self._on_start(progress.batches_trained)
            self._start_checks()
            drawn = int(loop_state.get("micro_batches_drawn", 0))
            assert self._stream is not None
            self._iterator = self._stream.open(drawn)
            if settings.is_rewrite:
                return self._rewrite()
            if self._instruments is not None:
                stack.enter_context(self._instruments)
                self._instruments.begin(progress.batches_trained)
                if self._iterator is not None:
                    self._iterator.watch = self._instruments.on_batch_loaded
            self._reports.open(stack, self._stream.count_records, self._batches_total)
            self._runtime.bind_training_iterator(self._iterator)
            self._runtime.set_training(True)
            callbacks.call("on_training_start")
            if self._context.profiler is not None:
                stack.enter_context(self._context.profiler)
            self._loader.restore_random_states()
            is_fresh = progress.batches_trained == 0 and progress.last_validation is None
            if settings.step_zero_validation and is_fresh:
                begin_phase("validating before the first batch")
                self._validate()
            stack.callback(self._report_steps)
            with self._failure_logged():
                stopped = self._train()
                with self._heartbeat.during(Phase.SAVE, progress.batches_trained):
                    self._saver.finish()
                self._reports.upload()
                self._reports.require_written()
            if stopped is None:
                self._reports.finish_telemetry()
        skipped = sum(counts.num_skipped for counts in step_counts(self._context))
        return FitResult(
            progress.batches_trained, self._batches_total, stopped, self._checkpoint_uuid, skipped
        )

    def _start_checks(self) -> None:
        checks = self._settings.checks
        if checks.non_finite == "fail":
            self._weights = FiniteWeights(self._context.models)
        self._guard = NonFiniteGuard(
            checks.non_finite,
            checks.non_finite_patience,
            self._runtime.train_calls_per_batch,
            is_chief=self._is_chief,
            counts=step_counts(self._context),
            is_resumed=self._progress.batches_trained > 0,
        )

    def _report_steps(self) -> None:
        counts = step_counts(self._context)
        taken, skipped = (
            sum(count.num_steps for count in counts),
            sum(count.num_skipped for count in counts),
        )
        if self._is_chief:
            self._on_steps(taken, skipped)
            if skipped:
                logger.warning(
                    "%d of %d optimizer steps were skipped, because gradients were not finite", skipped, taken
                )

    def _rewrite(self) -> FitResult:
        """Save what was restored in the current layout. Ranks: all, collectively."""
        self._loader.restore_random_states()
        self._checkpoint(is_last=True)
        self._saver.finish()
        return FitResult(self._progress.batches_trained, self._batches_total, None, self._checkpoint_uuid)

    def _require_epoch_length(self) -> None:
        """Refuse periods that could never fall due."""
        if self._progress.epoch_length is not None:
            return
        counted = [
            boundary.value for boundary, period in self._periods.items() if period and period.unit == "epochs"
        ]
        if counted:
            raise ValueError(
                f"the periods to {', '.join(counted)} are counted in epochs, but the training loader has no length; expected "
                "batches. Use Batch(n), or give the loader a __len__."
            )

    def _restore(self) -> Mapping[str, Any]:
        latest = self._settings.latest_checkpoint
        if latest is None:
            return {}
        records = self._stream.records_per_batch if self._stream is not None else None
        loop_state, continues = self._loader.restore(latest, self._progress.epoch_length, records)
        if continues and self._is_chief:
            logger.info("resumed from checkpoint %s at batch %d", latest, self._progress.batches_trained)
        self._reports.restore(loop_state)
        return loop_state

    @contextlib.contextmanager
    def _failure_logged(self) -> Iterator[None]:
        """Log where training failed and the checkpoint to resume from; the error goes on."""
        try:
            yield
        except Exception as error:
            # Consequences of another rank's error: ours, and gloo's "Connection closed by peer".
            if isinstance(error, RankError) or " by peer" in str(error):
                raise
            if isinstance(error, CheckpointError) and not self._is_chief:
                raise  # all ranks raise the failure of one
            self._saver.close()
            progress = self._progress
            saved = progress.last_checkpoint
            logger.error(
                "rank %d failed at batch %d of %d; %s",
                self._distributed.rank,
                progress.batches_trained,
                self._batches_total,
                "there is no checkpoint to resume from"
                if saved is None
                else f"resume from the checkpoint of batch {saved}",
            )
            raise

    def _close_iterator(self) -> None:
        self._runtime.bind_training_iterator(None)
        self._iterator = None

    def _train(self) -> StopReason | None:
        """Train batch after batch; return why it stopped early, or None at the end."""
        progress = self._progress
        if progress.batches_trained >= self._batches_total and self._is_chief:
            logger.warning(
                "nothing is left to train: %d batches are done, and max_length is %d",
                progress.batches_trained,
                self._batches_total,
            )
        self._sync_points.start(progress.batches_trained)
        self._reports.start_clock()
        if self._is_chief and progress.batches_trained < self._batches_total:
            self._core.train.set_status("training")
            self._reports.submit_progress()
        stepped_before = self._adapter.micro_batches_stepped
        is_unproven = self._runtime.accumulates_itself
        begin_phase(FIRST_BATCH)
        while progress.batches_trained < self._batches_total:
            self._train_until(progress.batches_trained + 1 if is_unproven else self._next_event())
            if is_unproven:
                self._require_whole_batch(self._adapter.micro_batches_stepped - stepped_before)
                is_unproven = False
            batches = progress.batches_trained
            stop: StopReason | None = None
            if self._reports.is_under_way:
                stop = self._reports.end()
            if progress.epoch_length and batches % progress.epoch_length == 0:
                with self._heartbeat.during(Phase.CALLBACK, batches):
                    self._callbacks.call("on_training_epoch_end", progress.epoch_idx - 1)
            found = due(self._periods, batches, self._batches_total, progress.epoch_length)
            if (
                self._settings.reports_epochs
                and progress.epoch_length
                and batches % progress.epoch_length == 0
            ):
                found.add(Boundary.REPORT)
            is_point = batches >= self._sync_points.next_batch or self._is_stopped_alone()
            if found or (is_point and stop is None):
                stop = self._act(found, is_stopping=stop is not None) or stop
            if stop is not None and batches < self._batches_total:
                if self._is_chief:
                    logger.warning("stopping after batch %d (%s), with a checkpoint", batches, stop.value)
                if not progress.checkpoint_is_current:
                    self._checkpoint(is_last=True)
                return stop
        self._finish()
        return None

    def _require_whole_batch(self, num_stepped: int) -> None:
        """Refuse a self-accumulating ``train_batch`` that trains not exactly one batch.

        That it does so cannot be seen from outside, and a wrong number would make every count of batches wrong.

        Ranks: all, collectively (one ``allgather``, after the first batch of a run).
        """
        expected = self._adapter.micro_batches_per_batch
        for rank, found in enumerate(self._distributed.allgather(num_stepped)):
            if found != expected:
                raise AccumulationError(
                    f"train_batch did not train for gradient accumulation steps: it trained {found} micro batches on rank "
                    f"{rank} after disable_auto_grad_accumulation(); expected {expected}, the gradient_accumulation_steps of the "
                    "first engine. Draw and train that many in every call, or leave the accumulation to the loop by not calling "
                    "disable_auto_grad_accumulation()."
                )

    def _next_event(self) -> int:
        """Return the batch count up to which there is nothing to do but train."""
        progress = self._progress
        batches = progress.batches_trained
        found = next_due(self._periods, batches, self._batches_total, progress.epoch_length)
        found = min(found, self._sync_points.next_batch)
        if self._reports.is_under_way:
            found = batches + 1
        if progress.epoch_length:
            found = min(found, (progress.epoch_idx + 1) * progress.epoch_length)
        return max(found, batches + 1)

    def _is_stopped_alone(self) -> bool:
        return self._sync_points.is_single_rank and self._sync_points.is_stop_requested()

    def _train_until(self, end_batch: int) -> None:
        """Train up to ``end_batch``, exclusive, in one epoch; a lone rank may stop before.

        This is the hot path: no communication, no synchronisation, no decision.
        """
        context, runtime, progress, window = self._context, self._runtime, self._progress, self._window
        train_batch, iterator, reports_metrics = (
            self._trial.train_batch,
            self._iterator,
            self._reports_metrics,
        )
        is_single_rank, is_stop_requested = (
            self._sync_points.is_single_rank,
            self._sync_points.is_stop_requested,
        )
        epoch_idx = progress.epoch_idx
        is_first, self._is_first_batch = self._is_first_batch, False
        calls = range(runtime.train_calls_per_batch)
        if progress.is_epoch_start:
            with self._heartbeat.during(Phase.CALLBACK, progress.batches_trained):
                self._callbacks.epoch_start(epoch_idx)
        begin_batch = self._heartbeat.begin_batch
        instruments, began_s = self._instruments, time.monotonic()
        if instruments is not None:
            instruments.switch(True)
            if is_first:
                train_batch = instruments.first_batch(train_batch)
        if is_first:
            train_batch = observe_engines(LostGradientCheck())(train_batch)
        for batch_idx in range(progress.batches_trained, end_batch):
            begin_batch(batch_idx)
            runtime.current_batch_idx = batch_idx
            for _ in calls:
                returned = train_batch(iterator, epoch_idx, batch_idx)
                if reports_metrics:
                    window.add(as_mapping(returned, "train_batch"))
            progress.batches_trained = batch_idx + 1
            if is_first:
                is_first = False
                begin_phase(TRAINING)
                if runtime.stop_signals is not None:
                    runtime.stop_signals.listen()
                train_batch = self._trial.train_batch
                if instruments is not None:
                    instruments.end_first_batch(batch_idx + 1, time.monotonic() - began_s)
            if context.profiler is not None:
                context.profiler.step()
            if is_single_rank and is_stop_requested():
                break
        if instruments is not None:
            instruments.switch(False)
        self._heartbeat.begin(Phase.BETWEEN, progress.batches_trained)

    def _act(self, found: set[Boundary], *, is_stopping: bool = False) -> StopReason | None:
        """Do what is due, in order, and exchange once. Ranks: all, collectively.

        The exchange may end after the next batch: ``ReportExchange.may_defer``.
        """
        reports = Boundary.REPORT in found or (Boundary.END in found and self._reports.has_unreported)
        if not is_stopping and not found - {Boundary.REPORT} and self._reports.may_defer:
            self._reports.begin(reports=reports, defers=True)
            return None
        self._reports.begin(reports=reports)
        stop = self._reports.end()
        if found & {Boundary.VALIDATE, Boundary.END} and not self._progress.validation_is_current:
            self._validate()
        if Boundary.CHECKPOINT in found and not self._progress.checkpoint_is_current:
            self._checkpoint()
        if found - {Boundary.REPORT}:
            self._sync_points.start(self._progress.batches_trained)
        return stop

    def _finish(self) -> None:
        if not self._progress.validation_is_current:
            self._validate()
        if not self._progress.checkpoint_is_current:
            self._checkpoint(is_last=True)
        if not self._progress.checkpoint_is_current:
            raise NonFiniteError(
                f"at the end of training, at batch {self._progress.batches_trained}, {lost_weight(self._state_evidence())}; "
                "expected weights to save. Lower the learning rate, or set data.dstrial.non_finite to warn or ignore; the "
                "checkpoints before it are kept."
            )
        self._reports.submit_progress()
        if self._is_chief:
            self._reports.writer.submit(functools.partial(self._core.train.report_progress, 1.0))

    # ---- reports -------------------------------------------------------------------------------------

    def _judge(
        self,
        shares: Sequence[MetricTotals | None],
        averages: Mapping[str, Any],
        counts: Sequence[StepCounts],
        exchanged: Exchange,
    ) -> None:
        assert self._guard is not None
        skipped = sum(count.num_skipped for count in exchanged.counts)
        if skipped and self._is_chief:
            taken = sum(count.num_steps for count in exchanged.counts)
            self._reports.writer.submit(functools.partial(self._on_steps, taken, skipped))
        self._guard.judge(
            [share.tails for share in shares if share is not None],
            averages,
            counts,
            (exchanged.start, exchanged.batches),
            is_last=exchanged.batches >= self._batches_total,
        )

    # ---- validation and checkpoints ------------------------------------------------------------------

    def _validate(self) -> None:
        """Validate, report, and checkpoint as the policy says. Ranks: all, collectively."""
        progress = self._progress
        if self._validation is None:
            progress.last_validation = progress.batches_trained
            return
        with self._heartbeat.during(Phase.VALIDATION, progress.batches_trained):
            saves = self._validate_and_report(self._validation)
        if saves and not progress.checkpoint_is_current:
            self._checkpoint()
        self._reports.start_clock()
        if self._is_chief:
            self._core.train.set_status("training")

    def _validate_and_report(self, validation: Validation) -> bool:
        """Return whether the policy asks for a checkpoint. Ranks: all, collectively."""
        progress = self._progress
        if self._is_chief:
            self._core.train.set_status("validating")
        settings = self._settings
        return self._reports.report_validation(
            validation.run(),
            epochs=progress.epochs_trained,
            policy=settings.checkpoint_policy,
            searcher_metric=settings.searcher_metric,
            smaller_is_better=settings.smaller_is_better,
        )

    def _state_evidence(self) -> list[StateEvidence]:
        """Look at the weights and newest losses of all ranks. Ranks: all, collectively."""
        if self._weights is None:
            return []
        mine = StateEvidence(self._weights.lost(), self._window.newest_is_finite())
        found: list[StateEvidence] = self._distributed.allgather(mine)
        return found

    def _checkpoint(self, *, is_last: bool = False) -> None:
        """Copy the current state and begin to write it. Ranks: all, collectively.

        A state whose weights are not finite is never saved. One without a finite loss is saved only where training ends or stops
        (``is_last``), because a checkpoint takes the place of an older one.
        """
        self._reports.require_written()
        found = self._state_evidence()
        problem = lost_weight(found) if is_last else unsafe_to_save_reason(found)
        if problem is not None:
            if self._is_chief and not self._is_skipping_save:
                logger.warning(
                    "the state of batch %d is not saved, and the checkpoints before it are kept: %s",
                    self._progress.batches_trained,
                    problem,
                )
            self._is_skipping_save = True
            return
        self._is_skipping_save = False
        if self._is_chief:
            self._core.train.set_status("checkpointing")
        loop_state: dict[str, Any] = {
            "micro_batches_drawn": self._iterator.drawn if self._iterator is not None else 0,
            **self._reports.state(),
        }
        if self._stream is not None and self._stream.records_per_batch is not None:
            loop_state["records_per_batch"] = self._stream.records_per_batch
        with self._heartbeat.during(Phase.SAVE, self._progress.batches_trained):
            self._checkpoint_uuid = self._saver.save(loop_state)
        self._reports.start_clock()
        if self._is_chief:
            self._core.train.set_status("training")

    # ---- set-up --------------------------------------------------------------------------------------

    def _build_loaders(self) -> None:
        """Build this rank's loaders and compare their lengths. Ranks: all, collectively."""
        context, runtime, settings = self._context, self._runtime, self._settings
        checks_disabled = runtime.repro_checks_disabled
        training = validation = None
        error: Exception | None = None
        if runtime.mpu.should_build_data_loader:
            training = self._trial.build_training_data_loader()
            validation = self._trial.build_validation_data_loader()
        try:
            self._stream = TrainingStream(
                training, self._adapter, self._distributed.rank, settings.data_seed, checks_disabled
            )
        except DataError as caught:
            error = caught
        must_read = runtime.mpu.should_build_data_loader
        length = self._stream.epoch_length if self._stream else None
        gathered = self._distributed.allgather(
            (must_read, training is not None, length, str(error) if error else None)
        )
        self._progress.epoch_length = agreed_epoch_length(gathered)
        runtime.epoch_length = self._progress.epoch_length
        assert self._stream is not None
        if self._is_chief:
            for note in self._stream.notes:
                logger.info("%s", note)
        stream = ValidationStream(
            validation,
            self._adapter,
            runtime.forward_is_collective,
            settings.data_seed,
            checks_disabled,
            self._trial.get_batch_length,
        )
        candidate = Validation(self._trial, context, self._callbacks, stream, settings.max_validation_rounds)
        self._validation = candidate if candidate.agree_on_extent() else None
        if self._validation is None and settings.searcher_metric is not None and self._is_chief:
            logger.warning(
                "there is no validation data, so searcher.metric %r is never reported",
                settings.searcher_metric,
            )


def require_engine(trial: DeepSpeedTrial, context: DeepSpeedTrialContext) -> None:
    if not context.models:
        raise InvalidTrialError(
            f"{type(trial).__name__} has no wrapped model engine; expected at least one. Call "
            "context.wrap_model_engine(engine) in __init__."
        )


def _optional_period(unit: pytorch.TrainUnit | None) -> Period | None:
    return None if unit is None else Period.from_train_unit(unit)
