"""``DetCallback`` connects a Trainer to its trial: reports, checkpoints, stops."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import transformers
from determined import core

from dstrial.config.dotted_keys import wants_system_metrics
from dstrial.integrations.huggingface import arguments
from dstrial.integrations.huggingface.checkpoints import TrainerCheckpoints
from dstrial.integrations.huggingface.metrics import LogKind, LossWatch, MetricReporter, kind_of
from dstrial.integrations.huggingface.telemetry import TrainerTelemetry
from dstrial.integrations.huggingface.trial import Startup
from dstrial.loop.sync_point import StopReason, SyncPoints
from dstrial.ranks.heartbeat import Phase, heartbeat
from dstrial.ranks.stop_signals import StopSignals

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

logger = logging.getLogger("dstrial.integrations.huggingface")


class LeaveTrainingError(Exception):
    """Raised by a callback to end ``Trainer.train``; ``huggingface.train`` catches it."""

    def __init__(self, step: int) -> None:
        super().__init__(
            f"training ends at step {step}; start it with dstrial.integrations.huggingface.train(trainer, callback), "
            "which handles this error"
        )
        self.step = step


class _PreemptionHandler:
    """Receives stop requests, and makes all ranks stop after the same step.

    With several ranks, stop requests are exchanged at each log entry, evaluation and save, and about every five seconds
    (:class:`SyncPoints`).
    """

    def __init__(self, core_context: core.Context, signals: StopSignals | None) -> None:
        self._preempt = core_context.preempt
        self._is_chief = core_context.distributed.rank == 0
        self._signals = signals
        self._mode = core.PreemptMode(self._preempt._preempt_mode)
        self._sync_points = SyncPoints(core_context.distributed, self._stop_request)
        self.reason: StopReason | None = None
        """The reason for stopping early; None until all ranks agree to stop."""

    def start(self, step: int) -> None:
        """Choose the step after ``step`` at which ranks next exchange stop requests."""
        self._sync_points.start(step)

    def after_step(self, step: int, *, is_due: bool) -> bool:
        """Return whether all ranks stop after this step.

        ``is_due``: whether a log entry, evaluation or save follows the step. Ranks: all, collectively.
        """
        is_time = self._sync_points.is_single_rank or step >= self._sync_points.next_batch
        return self.agree(step) if is_due or is_time else self.reason is not None

    def agree(self, step: int) -> bool:
        """Exchange stop requests; return whether all ranks stop. Ranks: all, collectively."""
        if self.reason is None:
            self.reason = self._sync_points.agree(step).stop
        return self.reason is not None

    def acknowledge(self) -> None:
        if self._is_chief:
            self._preempt.acknowledge_preemption_signal()

    def _stop_request(self) -> StopReason | None:
        # In preempt mode WorkersAskChief, should_preempt() is a broadcast, which all ranks must call.
        polls = self._is_chief or self._mode is not core.PreemptMode.ChiefOnly
        if polls and self._preempt.should_preempt(auto_ack=False):
            return StopReason.PREEMPTED
        is_signalled = self._signals is not None and self._signals.requested is not None
        return StopReason.SIGNAL if is_signalled else None


class DetCallback(transformers.TrainerCallback):  # type: ignore[misc]  # mypy does not follow transformers
    """Trainer callback that reports metrics, stores checkpoints, stops and resumes.

    Works under Determined's master, dstrial's master and without a master. If training is complete, it ends with an evaluation
    (if the Trainer has an evaluation set) and a checkpoint.

    Stop requests are a pause or stop by the master, SIGTERM and Ctrl-C. All ranks stop after the same step, at the latest about
    five seconds after the request; a running evaluation is completed first. A request after the last step has no effect.

    Args:
        core_context: the result of :func:`dstrial.integrations.huggingface.init` or ``det.core.init``.
        args: the Trainer's arguments; not changed.
        filter_metrics: substrings; only metrics whose names contain one of them are reported, besides those that the
            ``searcher`` section names. None reports all metrics.
        user_data: JSON values to store in every checkpoint as ``my_data.json``.

    Raises:
        ConfigError: the arguments contradict the experiment config, the number of ranks or the checkpoint.
        CheckpointError: the checkpoint to resume from cannot be read.

    Ranks: all, collectively.
    """

    def __init__(
        self,
        core_context: core.Context,
        args: TrainingArguments,
        filter_metrics: Sequence[str] | None = None,
        user_data: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.core_context = core_context
        self.filter_metrics = filter_metrics
        self.user_data = user_data
        self.trainer: Any = None  # set by `huggingface.train`
        self.startup = Startup(core_context, args)
        weakref.finalize(self, self.startup.close)
        is_chief, facts = core_context.distributed.rank == 0, self.startup.facts
        length = float(arguments.length_of(args)[1])
        # Scripts written for Determined before 0.38 read this attribute.
        self.current_op = core.DummySearcherOperation(
            int(length) if length.is_integer() else length, is_chief
        )
        self._checkpoints = TrainerCheckpoints(core_context, self.startup.run_description(user_data))
        self._reporter = MetricReporter(core_context, facts.searcher, filter_metrics)
        self._losses = LossWatch(facts.exp_conf, is_chief=is_chief, is_off=facts.is_measuring)
        self._telemetry = TrainerTelemetry(core_context, facts.exp_conf)
        self._preemption = _PreemptionHandler(core_context, facts.signals)
        self._heartbeat = heartbeat()
        self._in_training = False
        self._has_finished = False

    @property
    def checkpoint_path(self) -> str | None:
        """Value for ``Trainer.train(resume_from_checkpoint=...)``; None for a new trial."""
        return self.startup.checkpoint_path

    @property
    def is_stopped(self) -> bool:
        """Whether all ranks have agreed to stop early, on request."""
        return self._preemption.reason is not None

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        **_kwargs: Any,
    ) -> None:
        del control
        step, facts = state.global_step, self.startup.facts
        self.startup.require_resumed(step, is_attached=self.trainer is not None)
        self._in_training = True
        self._has_finished = step >= state.max_steps > 0
        self._checkpoints.begin(self.trainer, args, state, model)
        self._reporter.start(state)
        self._losses.start(step)
        self.startup.settle_best_model(state)
        if step > 0:
            self._checkpoints.last_step = step
        self._preemption.start(step)
        if wants_system_metrics(facts.exp_conf) and not facts.is_measuring:
            self.core_context.profiler.on()
        if self._has_finished and self.trainer is not None:
            raise LeaveTrainingError(step)
        if self._has_finished:
            logger.warning(
                "step %d of %d: nothing is left to train, and Trainer.train() trains a step more; call "
                "dstrial.integrations.huggingface.train(trainer, callback), which does not",
                step,
                state.max_steps,
            )

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_kwargs: Any
    ) -> None:
        del args, control
        self._enter(Phase.BATCH, state.global_step)
        self._reporter.speed.resume()
        self._reporter.flush(state)
        self._telemetry.begin_step(self.trainer, state.global_step)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_kwargs: Any
    ) -> None:
        self._telemetry.end_step(state.global_step, float(state.num_input_tokens_seen))
        self._reporter.progress(state.global_step, state.max_steps)
        if self.is_stopped:
            # The stop was requested in the evaluation before the first step. The Trainer has trained one step nevertheless.
            self._stop(state, control)
            self._skip_evaluation(args, state, control)
        elif control.should_training_stop or state.global_step >= state.max_steps:
            self._finish(args, control)
        elif self._preemption.after_step(
            state.global_step,
            is_due=control.should_log or control.should_evaluate or control.should_save,
        ):
            self._stop(state, control)
        self._disable_eval_and_save(control)
        self._announce_next(args, state, control, otherwise=Phase.BATCH)

    def _enter(self, phase: Phase, step: int) -> None:
        if self._heartbeat.phase is not phase:
            self._heartbeat.begin(phase, step)

    def _disable_eval_and_save(self, control: TrainerControl) -> None:
        if self.startup.facts.is_measuring:
            control.should_evaluate = control.should_save = False

    def _finish(self, args: TrainingArguments, control: TrainerControl) -> None:
        self._has_finished = True
        if arguments.evaluates_at_epochs(args):
            control.should_save = False
        elif self._can_evaluate(args):
            control.should_evaluate = True

    def _can_evaluate(self, args: TrainingArguments) -> bool:
        if self.trainer is None:
            return arguments.evaluates(args)
        return self.trainer.eval_dataset is not None

    def _train_batch_size(self, args: TrainingArguments, state: TrainerState) -> int:
        if self.trainer is not None:
            return int(self.trainer.get_total_train_batch_size(args))
        micro = int(state.train_batch_size or args.train_batch_size)
        return micro * int(args.gradient_accumulation_steps) * int(args.world_size)

    def _stop(self, state: TrainerState, control: TrainerControl) -> None:
        control.should_training_stop = True
        control.should_save = state.global_step > self._checkpoints.last_step

    def _skip_evaluation(self, args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
        if not arguments.is_evaluation_due(args, state):
            control.should_evaluate = False

    def _announce_next(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, otherwise: Phase
    ) -> None:
        may_save = control.should_save or (arguments.saves_best(args) and control.should_evaluate)
        if may_save or self._checkpoints.is_stale(state.global_step):
            self._checkpoints.prepare(args, state.global_step)
        if control.should_evaluate or control.should_save:
            self._reporter.speed.pause()
            self._telemetry.pause()
        if control.should_evaluate:
            otherwise = Phase.VALIDATION
        elif control.should_save:
            otherwise = Phase.SAVE
        elif control.should_training_stop or self._has_finished:
            otherwise = Phase.SCRIPT
        # If a later callback requests an evaluation, on_prediction_step sends the phase of the evaluation.
        self._heartbeat.begin(otherwise, state.global_step)

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_kwargs: Any
    ) -> None:
        del args, control
        if self._in_training:
            self._enter(Phase.VALIDATION, state.global_step)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002
        logs: Mapping[str, Any] | None = None,
        **_kwargs: Any,
    ) -> None:
        if logs:
            batch_size = self._train_batch_size(args, state)
            self._reporter.log(logs, state, batch_size, is_stopped=self.is_stopped)
            if kind_of(logs) is LogKind.TRAINING:
                self._telemetry.report_log(state.global_step, float(state.num_input_tokens_seen), batch_size)
                self._losses.check(logs, state.global_step, state.max_steps)

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_kwargs: Any
    ) -> None:
        """Report the evaluation; stop if a stop was requested during the evaluation."""
        has_one_set = self.trainer is not None and not isinstance(self.trainer.eval_dataset, dict)
        if not self._in_training or has_one_set:
            self._reporter.flush(
                state
            )  # metrics of several evaluation sets are reported together at the next event
        if not self._in_training:
            return
        if control.should_training_stop and not self.is_stopped:
            self._has_finished = True
        if not self._has_finished and self._preemption.agree(state.global_step):
            self._stop(state, control)
        self._preemption.start(state.global_step)
        if arguments.saves_best(args) and control.should_save and self.trainer is not None:
            # Training ends here. The Trainer would only save the model if its metric has improved.
            self._checkpoints.save_now(self.trainer, args, state, control)
        elif control.should_save or arguments.saves_best(args):
            self._checkpoints.prepare(args, state.global_step)
        # Next, the Trainer saves, calls other callbacks, or evaluates the next evaluation set.
        saves = control.should_save or arguments.saves_best(args)
        self._heartbeat.begin(Phase.SAVE if saves else Phase.SCRIPT, state.global_step)

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002
        **_kwargs: Any,
    ) -> None:
        """Store the Trainer's files as a checkpoint, unless the newest loss is not finite."""
        self._reporter.flush(state)
        if not self._losses.is_save_unsafe(state.global_step):
            self._checkpoints.store(self.trainer, args, state, self._train_batch_size(args, state))
        self._heartbeat.begin(Phase.SCRIPT, state.global_step)

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_kwargs: Any
    ) -> None:
        del args, control
        self._reporter.flush(state)
        self._heartbeat.begin(Phase.BATCH, state.global_step)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_kwargs: Any
    ) -> None:
        """Request the last evaluation and the last checkpoint if training ends here."""
        self._reporter.flush(state)
        step = state.global_step
        if control.should_training_stop or step >= state.max_steps:
            self._has_finished = not self.is_stopped
            if self._has_finished and not self._reporter.is_validated(step):
                control.should_evaluate |= self._can_evaluate(args)
            control.should_save = True
        if self.is_stopped:
            # The Trainer sets should_training_stop to False at the end of an epoch.
            control.should_training_stop = True
            self._skip_evaluation(args, state, control)
        if step == self._checkpoints.last_step:
            control.should_save = False  # this step is stored already
        self._disable_eval_and_save(control)
        self._announce_next(args, state, control, otherwise=Phase.SCRIPT)

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002
        **_kwargs: Any,
    ) -> None:
        del args
        self._reporter.flush(state)
        self.end(state.global_step, state.max_steps)

    def end(self, step: int, max_steps: int) -> None:
        """Report that training is complete or stopped, then close.

        Ranks: all, without communication.
        """
        if self._in_training and self.is_stopped:
            # Without the acknowledgement, the master takes exit code 0 for a complete trial.
            self._preemption.acknowledge()
        elif self._in_training and self._has_finished:
            self._reporter.finish(step, max_steps)
        self._in_training = False
        self.close()

    def close(self) -> None:
        """Close telemetry, heartbeat and the checkpoint to resume from. Idempotent."""
        self._heartbeat.end()
        self._telemetry.close()
        self.startup.close()
