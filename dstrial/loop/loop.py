"""The training loop of a trial, for data-parallel and pipeline engines."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from dstrial.engine.engine_hooks import LostGradientCheck, observe_engines
from dstrial.errors import CheckpointError, DataError, NonFiniteError, RankError, TrialContractError
from dstrial.loop.boundaries import (
    Boundary,
    FitResult,
    LoopSettings,
    Progress,
    due,
    next_due,
    total_batches,
)
from dstrial.loop.callbacks import Callbacks
from dstrial.loop.checkpoint_loader import CheckpointLoader
from dstrial.loop.checkpoint_saver import CheckpointSaver
from dstrial.loop.data.passes import reading_problems, resume_mode
from dstrial.loop.data.training import CountingIterator, TrainingStream, agreed_epoch_length
from dstrial.loop.data.validation import ValidationStream
from dstrial.loop.metric_sinks import MetricSink
from dstrial.loop.metrics import MetricWindow, as_mapping
from dstrial.loop.non_finite import (
    FiniteWeights,
    NonFiniteGuard,
    StateEvidence,
    lost_weight,
    unsafe_to_save_reason,
)
from dstrial.loop.report_exchange import ReportExchange, step_counts, sum_steps
from dstrial.loop.run_state import RunState
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
    """Raise ``TrialContractError`` if user code in the block calls ``sys.exit(0)``.

    Exit code 0 would look like a finished run. ``where`` returns the position in training for the message.
    """
    try:
        yield
    except SystemExit as exit_:
        if type(exit_) is not SystemExit or exit_.code:  # dsat ends measured runs with a subclass
            raise
        raise TrialContractError(
            f"user code ends the rank with exit code 0 {where()}; expected training to go on to its end. To stop it early, call "
            "context.set_stop_requested(True) or exit with another code."
        ).with_traceback(exit_.__traceback__) from None


class TrainingLoop:
    """Trains one trial to its last batch or to a stop request; call ``run`` once.

    Args:
        stop_request: function that returns this rank's reason to stop, or None; called on every rank.
        metric_sinks: receivers of reported metrics besides Determined's Core API and TensorBoard.
    """

    def __init__(
        self,
        trial: DeepSpeedTrial,
        context: DeepSpeedTrialContext,
        settings: LoopSettings,
        stop_request: Callable[[], StopReason | None],
        *,
        metric_sinks: Sequence[MetricSink] = (),
    ) -> None:
        self._trial = trial
        self._context = context
        self._runtime = runtime_of(context)
        self._settings = settings
        self._core = self._runtime.core
        self._distributed = context.distributed
        self._is_chief = self._runtime.is_chief
        self._adapter = self._runtime.adapter
        self._callbacks = Callbacks(trial.build_callbacks())
        keep_batches = self._callbacks.overrides("on_training_workload_end")
        self._window = MetricWindow(
            "train_batch", keep_batches=keep_batches, watches_losses=settings.checks.non_finite != "ignore"
        )
        self._progress = Progress(epoch_length=None)
        self._sync_points = SyncPoints(context.distributed, stop_request)
        self._weights: FiniteWeights | None = None
        self._is_skipping_save = False
        self._periods = settings.periods()
        state = RunState(trial, context, self._callbacks, self._progress, self._window, settings.trial_id)
        self._loader = CheckpointLoader(state)
        self._saver = CheckpointSaver(state, in_background=settings.saves_in_background)
        self._instruments = (
            Instruments(context.models, self._adapter.data_parallel_rank, count_tokens=trial.get_num_tokens)
            if settings.has_telemetry
            else None
        )
        self._reports = ReportExchange(state, self._sync_points, self._saver, metric_sinks, self._instruments)
        self._stream: TrainingStream | None = None
        self._has_own_loaders = False  # whether any rank's training loader is not dstrial.DataLoader
        self._validation: Validation | None = None
        self._iterator: CountingIterator | None = None
        self._batches_total = 0
        self._checkpoint_uuid: str | None = None
        self._heartbeat = heartbeat()

    # ---- training ------------------------------------------------------------------------------------

    def run(self) -> FitResult:
        """Train to the last batch, or until the ranks agree to stop.

        Ranks: all, collectively.
        """
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
            stream = self._build_loaders()
            self._batches_total = total_batches(settings.max_length, progress.epoch_length)
            self._require_epoch_length()
            loop_state = self._restore(stream)
            if (kept := self._runtime.kept_reports) is not None:
                kept.rewind_to(progress.batches_trained)
            self._start_checks()
            if settings.is_rewrite:
                return self._rewrite(loop_state)
            drawn = int(loop_state.get("micro_batches_drawn", 0))
            self._iterator = stream.open(drawn, loop_state.get("loaders", ()))
            if self._instruments is not None:
                stack.enter_context(self._instruments)
                whole = stream.records_per_batch is not None
                self._instruments.begin(progress.batches_trained, reads_whole_records=whole)
                if self._iterator is not None:
                    self._iterator.watch = self._instruments.on_batch_loaded
            self._reports.open(stack, stream.count_records, self._batches_total)
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
            stack.callback(self._keep_steps)
            with self._failure_logged():
                stopped = self._train()
                if stopped is None:
                    self._finish()
                with self._heartbeat.during(Phase.SAVE, progress.batches_trained):
                    self._saver.finish()
                self._reports.upload()
                self._reports.require_written()
        _, skipped = sum_steps(step_counts(self._context))
        return FitResult(
            progress.batches_trained, self._batches_total, stopped, self._checkpoint_uuid, skipped
        )

    def _train(self) -> StopReason | None:
        """Train the remaining batches; return why training stopped early, or None.

        The loop communicates and synchronises devices only after some batches: the first, those at which an action is due, and
        sync points. Stop requests are polled at sync points; with a single rank, after every batch.
        """
        runtime, progress, window = self._runtime, self._progress, self._window
        batches_total, profiler = self._batches_total, self._context.profiler
        self._begin_training()
        if progress.batches_trained >= batches_total:
            return None
        calls, iterator = range(runtime.train_calls_per_batch), self._iterator
        reports_metrics = runtime.mpu.should_report_metrics
        points = self._sync_points
        polls_stop = points.is_single_rank
        next_event = progress.batches_trained + 1
        end_first_batch: Callable[[], None] | None
        train_batch, end_first_batch = self._observe_first_batch()
        self._resume()
        while (batch_idx := progress.batches_trained) < batches_total:
            self._heartbeat.begin_batch(batch_idx)
            runtime.current_batch_idx, epoch_idx = batch_idx, progress.epoch_idx
            for _ in calls:
                returned = train_batch(iterator, epoch_idx, batch_idx)
                if reports_metrics:
                    window.add(as_mapping(returned, "train_batch"))
            progress.batches_trained = batch_idx + 1
            if profiler is not None:
                profiler.step()
            if batch_idx + 1 < next_event and not (polls_stop and points.is_stop_requested()):
                continue
            if end_first_batch is not None:
                end_first_batch()
                end_first_batch, train_batch = None, self._trial.train_batch
            stop = self._handle_events(self._due())
            if stop is not None:
                return stop
            next_event = min(self._next_due(), points.next_batch)
            self._resume()
        return None

    def _due(self) -> set[Boundary]:
        progress = self._progress
        found = due(self._periods, progress.batches_trained, self._batches_total, progress.epoch_length)
        if self._settings.reports_epochs and progress.is_epoch_start:
            found.add(Boundary.REPORT)
        return found

    def _next_due(self) -> int:
        progress = self._progress
        return next_due(self._periods, progress.batches_trained, self._batches_total, progress.epoch_length)

    def _is_sync_point(self) -> bool:
        points = self._sync_points
        return self._progress.batches_trained >= points.next_batch or (
            points.is_single_rank and points.is_stop_requested()
        )

    def _begin_training(self) -> None:
        progress = self._progress
        is_over = progress.batches_trained >= self._batches_total
        if is_over and self._is_chief:
            logger.warning(
                "nothing is left to train: %d batches are done, and max_length is %d",
                progress.batches_trained,
                self._batches_total,
            )
        self._sync_points.start(progress.batches_trained)
        self._reports.start_clock()
        if self._is_chief and not is_over:
            self._core.train.set_status("training")
            self._reports.submit_progress()
        begin_phase(FIRST_BATCH)

    def _observe_first_batch(self) -> tuple[Callable[..., Any], Callable[[], None]]:
        """Return ``train_batch`` for the first batch, and a function to call afterwards.

        The returned ``train_batch`` measures the batch, and raises an error if ZeRO drops gradients. The function reports the
        first batch's time and enables stop signals. Ranks: all call the function, collectively.
        """
        began_s, stepped_before = time.monotonic(), self._adapter.micro_batches_stepped
        train_batch: Callable[..., Any] = self._trial.train_batch
        if self._instruments is not None:
            train_batch = self._instruments.first_batch(train_batch)

        def end() -> None:
            runtime = self._runtime
            begin_phase(TRAINING)
            if runtime.stop_signals is not None:
                runtime.stop_signals.listen()
            if self._instruments is not None:
                self._instruments.end_first_batch(self._progress.batches_trained, time.monotonic() - began_s)
            self._heartbeat.begin(Phase.BETWEEN, self._progress.batches_trained)  # waits for all ranks
            if self._has_own_loaders and not self._sync_points.is_single_rank:
                self._compare_reading()
            if runtime.accumulates_itself:
                self._require_whole_batch(self._adapter.micro_batches_stepped - stepped_before)

        return observe_engines(LostGradientCheck())(train_batch), end

    def _compare_reading(self) -> None:
        """Warn if replicas read equal records, or ranks of one replica different ones.

        Ranks: all, collectively (one ``allgather``, after the first batch of a run).
        """
        passes = self._stream.passes if self._stream is not None else None
        mine = (self._adapter.data_parallel_rank, passes.first_digest if passes is not None else None)
        for problem in reading_problems(self._distributed.allgather(mine)):
            if self._is_chief:
                logger.warning("%s", problem)

    def _resume(self) -> None:
        progress = self._progress
        if progress.batches_trained >= self._batches_total:
            return
        if progress.is_epoch_start:
            with self._heartbeat.during(Phase.CALLBACK, progress.batches_trained):
                self._callbacks.epoch_start(progress.epoch_idx)
        if self._instruments is not None:
            self._instruments.switch(True)

    def _handle_events(self, found: set[Boundary]) -> StopReason | None:
        """Execute the actions that are due after a batch; return why to stop, or None.

        Ranks: all, collectively.
        """
        progress = self._progress
        if self._instruments is not None:
            self._instruments.switch(False)
        self._heartbeat.begin(Phase.BETWEEN, progress.batches_trained)
        if progress.is_epoch_start:
            with self._heartbeat.during(Phase.CALLBACK, progress.batches_trained):
                self._callbacks.call("on_training_epoch_end", progress.epoch_idx - 1)
        stop = None
        if found or self._is_sync_point():
            reports = Boundary.REPORT in found or (Boundary.END in found and self._reports.has_unreported)
            stop = self._reports.exchange(reports=reports)
        if found & {Boundary.VALIDATE, Boundary.END} and not progress.validation_is_current:
            self._validate()
        if Boundary.CHECKPOINT in found and not progress.checkpoint_is_current:
            self._checkpoint()
        if found - {Boundary.REPORT}:
            self._sync_points.start(progress.batches_trained)
        if stop is None or Boundary.END in found:
            return None
        if self._is_chief:
            logger.warning(
                "stopping after batch %d (%s), with a checkpoint", progress.batches_trained, stop.value
            )
        if not progress.checkpoint_is_current:
            self._checkpoint(is_last=True)
        return stop

    def _finish(self) -> None:
        """Validate and save the final state, unless already done.

        Raises:
            NonFiniteError: the weights are not finite, so that no checkpoint was saved.

        Ranks: all, collectively.
        """
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

    def _rewrite(self, loop_state: Mapping[str, Any]) -> FitResult:
        """Save the loaded checkpoint in this run's rank layout. Ranks: all, collectively.

        ``loop_state``, the position in the training data, is saved unchanged; the run that resumes converts the position.
        """
        self._loader.restore_random_states()
        self._checkpoint(is_last=True, position=loop_state)
        self._saver.finish()
        return FitResult(self._progress.batches_trained, self._batches_total, None, self._checkpoint_uuid)

    def _keep_steps(self) -> None:
        taken, skipped = sum_steps(step_counts(self._context))
        if not self._is_chief:
            return
        if (kept := self._runtime.kept_reports) is not None:
            kept.note_steps(taken, skipped)
        if skipped:
            logger.warning(
                "%d of %d optimizer steps were skipped, because gradients were not finite", skipped, taken
            )

    @contextlib.contextmanager
    def _failure_logged(self) -> Iterator[None]:
        """Log where training failed and the checkpoint to resume from; re-raise the error."""
        try:
            yield
        except Exception as error:
            # `RankError` and gloo's "Connection closed by peer" are only consequences of another rank's failure.
            if isinstance(error, RankError) or " by peer" in str(error):
                raise
            if isinstance(error, CheckpointError) and not self._is_chief:
                raise  # the chief raises the same failure, and logs it
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
        if self._stream is not None:
            self._stream.close()

    # ---- validation and checkpoints ------------------------------------------------------------------

    def _validate(self) -> None:
        """Validate; save a checkpoint if the policy wants one. Ranks: all, collectively."""
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
        """Validate and report the metrics; return whether the policy wants a checkpoint.

        Ranks: all, collectively.
        """
        progress = self._progress
        if self._is_chief:
            self._core.train.set_status("validating")
        settings = self._settings
        return self._reports.report_validation(
            validation.run(),
            epochs=progress.epoch_idx,
            policy=settings.checkpoint_policy,
            searcher_metric=settings.searcher_metric,
            smaller_is_better=settings.smaller_is_better,
        )

    def _state_evidence(self) -> list[StateEvidence]:
        """Return, for each rank, whether its weights and newest loss are finite.

        Empty unless ``data.dstrial.non_finite`` is ``fail``. Ranks: all, collectively.
        """
        if self._weights is None:
            return []
        mine = StateEvidence(self._weights.lost(), self._window.newest_is_finite())
        found: list[StateEvidence] = self._distributed.allgather(mine)
        return found

    def _checkpoint(self, *, is_last: bool = False, position: Mapping[str, Any] | None = None) -> None:
        """Start to save a checkpoint of the current batch. Ranks: all, collectively.

        ``position`` is the position in the training data, by default the current one. A state with non-finite weights is never
        saved. A state without a finite loss is saved only at the end of training or at a stop (``is_last``), because the new
        checkpoint may replace an older, good one.
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
        loop_state = {**(self._position() if position is None else position), **self._reports.state()}
        with self._heartbeat.during(Phase.SAVE, self._progress.batches_trained):
            self._checkpoint_uuid = self._saver.save(loop_state)
        self._reports.start_clock()
        if self._is_chief:
            self._core.train.set_status("training")

    def _position(self) -> dict[str, Any]:
        position: dict[str, Any] = {
            "micro_batches_drawn": self._iterator.drawn if self._iterator is not None else 0
        }
        if self._stream is not None:
            position["loaders"] = self._stream.positions()
            if self._stream.records_per_batch is not None:
                position["records_per_batch"] = self._stream.records_per_batch
        return position

    # ---- set-up --------------------------------------------------------------------------------------

    def _build_loaders(self) -> TrainingStream:
        """Build the loaders; return the training stream. Ranks: all, collectively.

        Sets the epoch length, on which all ranks agree. Without validation data, validation is disabled.
        """
        context, runtime, settings = self._context, self._runtime, self._settings
        must_read = runtime.mpu.should_build_data_loader
        checks_disabled = runtime.repro_checks_disabled
        training = self._trial.build_training_data_loader() if must_read else None
        validation = self._trial.build_validation_data_loader() if must_read else None
        problem: str | None = None
        try:
            self._stream = TrainingStream(
                training,
                self._adapter,
                self._distributed.rank,
                settings.data_seed,
                checks_disabled,
                resume_mode(runtime.exp_conf),
            )
        except DataError as error:
            problem = str(error)
        length = self._stream.epoch_length if self._stream else None
        has_own_loader = self._stream is not None and self._stream.passes is not None
        gathered = self._distributed.allgather(
            ((must_read, training is not None, length, problem), has_own_loader)
        )
        self._progress.epoch_length = runtime.epoch_length = agreed_epoch_length(
            [loader for loader, _ in gathered]
        )
        self._has_own_loaders = any(is_own for _, is_own in gathered)
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
        return self._stream

    def _require_epoch_length(self) -> None:
        """Raise ``ValueError`` if periods are in epochs, but the loader has no length."""
        if self._progress.epoch_length is not None:
            return
        counted = [boundary.value for boundary, period in self._periods.items() if period.unit == "epochs"]
        if counted:
            raise ValueError(
                f"the periods to {', '.join(counted)} are counted in epochs, but the training loader has no length; expected "
                "batches. Use Batch(n), or give the loader a __len__."
            )

    def _restore(self, stream: TrainingStream) -> Mapping[str, Any]:
        """Load the latest checkpoint; return its loop state. Ranks: all, collectively.

        Without a checkpoint, or with one of another trial, the loop state is empty.
        """
        latest = self._settings.latest_checkpoint
        if latest is None:
            return {}
        epoch_length = self._progress.epoch_length
        loop_state, continues = self._loader.restore(latest, epoch_length, stream.records_per_batch)
        if continues and self._is_chief:
            logger.info("resumed from checkpoint %s at batch %d", latest, self._progress.batches_trained)
        self._reports.restore(loop_state)
        return loop_state

    def _start_checks(self) -> None:
        checks = self._settings.checks
        if checks.non_finite == "fail":
            self._weights = FiniteWeights(self._context.models)
        self._reports.guard = NonFiniteGuard(
            checks.non_finite,
            checks.non_finite_patience,
            is_chief=self._is_chief,
            counts=step_counts(self._context),
            is_resumed=self._progress.batches_trained > 0,
        )

    def _require_whole_batch(self, num_stepped: int) -> None:
        """Check the count of trained micro batches on each rank. Ranks: all, collectively.

        Raises:
            AccumulationError: ``num_stepped`` differs from ``gradient_accumulation_steps`` on a rank.
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


def require_engine(trial: DeepSpeedTrial, context: DeepSpeedTrialContext) -> None:
    if not context.models:
        raise InvalidTrialError(
            f"{type(trial).__name__} has no wrapped model engine; expected at least one. Call "
            "context.wrap_model_engine(engine) in __init__."
        )
