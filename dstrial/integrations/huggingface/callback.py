"""``DetCallback``: a Trainer's metrics, checkpoints, progress and stops."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import transformers
from deepspeed import DeepSpeedEngine
from determined import core

from dstrial.config.dotted_keys import wants_system_metrics
from dstrial.integrations.huggingface import arguments
from dstrial.integrations.huggingface.checkpoint_uploader import CheckpointUploader
from dstrial.integrations.huggingface.logged_metrics import LogKind, kind_of
from dstrial.integrations.huggingface.metric_reports import CurrentOperation, MetricReporter
from dstrial.integrations.huggingface.non_finite import LossWatch
from dstrial.integrations.huggingface.preemption import LeaveTrainingError, PreemptionHandler
from dstrial.integrations.huggingface.resume import OpenedCheckpoint
from dstrial.integrations.huggingface.save_schedule import SaveSchedule
from dstrial.integrations.huggingface.startup import Startup
from dstrial.integrations.huggingface.trainer_telemetry import TrainerTelemetry
from dstrial.ranks.heartbeat import Phase, heartbeat

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

logger = logging.getLogger("dstrial.integrations.huggingface")


class DetCallback(transformers.TrainerCallback):  # type: ignore[misc]  # mypy does not follow transformers
    """Reports, stores checkpoints, stops when asked, resumes; Determined's signature.

    Works on a cluster, under the embedded master and outside of any, with the core context of
    :func:`dstrial.integrations.huggingface.init` or of ``det.core.init``. At the end of training, unless it was stopped, there
    is an evaluation (if there is an evaluation set) and a checkpoint.

    A request to stop (a pause, the searcher's stop, SIGTERM) is followed at the end of a training step, the same one on all
    ranks: the next that logs, evaluates or saves, or the next after about five seconds. If it comes during an evaluation, that
    evaluation ends first, unless ``leave_evaluation`` is set. One that comes after the last step stops nothing.

    Args:
        core_context: of the trial.
        args: those of the Trainer; not changed.
        filter_metrics: parts of names; a metric is reported if it has one of them. The searcher's metrics always are. None
            reports all.
        user_data: stored in every checkpoint as ``my_data.json``, if given.
        leave_evaluation: whether a request to stop ends an evaluation under way. For this a checkpoint is stored before every
            evaluation, which needs :func:`dstrial.integrations.huggingface.train`.

    Raises:
        ConfigError: the arguments contradict the experiment config, the ranks or the checkpoint; all contradictions at once.
        CheckpointError: the checkpoint to go on from cannot be read.

    Ranks: all, collectively.
    """

    def __init__(
        self,
        core_context: core.Context,
        args: TrainingArguments,
        filter_metrics: Sequence[str] | None = None,
        user_data: Mapping[str, Any] | None = None,
        *,
        leave_evaluation: bool = False,
    ) -> None:
        super().__init__()
        self.core_context = core_context
        self.filter_metrics = filter_metrics
        self.user_data = user_data
        self._leaves_evaluation = leave_evaluation
        self._startup = Startup(core_context, args)
        weakref.finalize(self, self._startup.close)
        rank, facts = core_context.distributed.rank, self._startup.facts
        self.current_op = CurrentOperation(
            arguments.length_of(args).value, core_context.train, is_chief=rank == 0
        )
        self._save_schedule = SaveSchedule(
            CheckpointUploader(core_context, self._startup.run_description(user_data))
        )
        self._reporter = MetricReporter(core_context, facts.searcher, filter_metrics)
        self._losses = LossWatch(facts.exp_conf, is_chief=rank == 0, is_off=facts.is_measuring)
        self._telemetry = TrainerTelemetry(core_context, facts.exp_conf, is_off=facts.is_measuring)
        self._preemption = PreemptionHandler(core_context, facts.signals)
        self._trainer_handle = arguments.TrainerHandle()
        self._heartbeat = heartbeat()
        self._in_training = False
        self._has_finished = False

    @property
    def checkpoint_path(self) -> str | None:
        """For ``Trainer.train(resume_from_checkpoint=...)``; None for a new trial."""
        return self._startup.checkpoint_path

    @property
    def is_stopped(self) -> bool:
        """Whether training was asked to end before its length; alike on all ranks."""
        return self._preemption.reason is not None

    def attach(self, trainer: Any) -> None:
        """Set the Trainer; ``train`` of this package does so."""
        self._trainer_handle.trainer = trainer

    def prepare_save(self, args: TrainingArguments, step: int) -> None:
        """Break a step's directory's links to checkpoints. Ranks: all, collectively."""
        self._enter(Phase.SAVE, step)
        self._save_schedule.prepare(args, step)

    def load_engine(self, engine: DeepSpeedEngine) -> None:
        """Load the checkpoint into a new engine. Ranks: all, collectively."""
        self._startup.load_engine(engine)

    @property
    def opened_checkpoint(self) -> OpenedCheckpoint | None:
        return self._startup.opened

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        **_kwargs: Any,
    ) -> None:
        step = state.global_step
        self._startup.require_resumed(step, is_attached=self._trainer_handle.is_known)
        if self._leaves_evaluation:
            self._trainer_handle.require(
                "leave_evaluation is True with trainer.train(); expected a checkpoint before each evaluation, which a callback "
                "alone cannot store"
            )
        self._in_training = True
        self._has_finished = step >= state.max_steps > 0
        self._save_schedule.begin(args, state, model)
        self._reporter.start(state)
        self._losses.start(step)
        if self._startup.facts.is_rewrite:
            self._save_schedule.rewrite(self._trainer_handle, args, state, control, str(self.checkpoint_path))
            raise LeaveTrainingError(step)
        self._startup.settle_best_model(state)
        if step > 0:
            self._save_schedule.last_step = step
        self._preemption.start(step)
        if wants_system_metrics(self._startup.facts.exp_conf) and not self._startup.facts.is_measuring:
            self.core_context.profiler.on()
        is_last, leaves = self._has_finished, self._leaves_evaluation
        if self._trainer_handle.owes_evaluation(args, state, is_last=is_last, leaves=leaves):
            self._trainer_handle.trainer.evaluate()
        if self._has_finished:
            if self._trainer_handle.is_known:
                raise LeaveTrainingError(step)
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
        self._telemetry.begin_step(self._trainer_handle.trainer, state.global_step)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_kwargs: Any
    ) -> None:
        self._telemetry.end_step(state.global_step, float(state.num_input_tokens_seen))
        self._reporter.progress(state.global_step, state.max_steps)
        if self.is_stopped:
            # In the evaluation before the first step, after which the Trainer trains one all the same.
            self._stop(state, control)
            self._skip_evaluation(args, state, control)
        elif control.should_training_stop or state.global_step >= state.max_steps:
            self._finish(args, control)
        elif self._preemption.after_step(
            state.global_step,
            is_due=control.should_log or control.should_evaluate or control.should_save,
        ):
            self._stop(state, control)
            if self._leaves_evaluation:
                control.should_evaluate = False
        self._disable_eval_and_save(control)
        self._expect(args, state, control, otherwise=Phase.BATCH)

    def _enter(self, phase: Phase, step: int) -> None:
        """Send the phase to the launcher, unless it is the current one."""
        if self._heartbeat.phase is not phase:
            self._heartbeat.follow(phase, step)

    def _disable_eval_and_save(self, control: TrainerControl) -> None:
        """Keep a trial of dsat, whose steps are timed, from evaluating and saving."""
        if self._startup.facts.is_measuring:
            control.should_evaluate = control.should_save = False

    def _finish(self, args: TrainingArguments, control: TrainerControl) -> None:
        """Request the last evaluation, and let the Trainer save after it."""
        self._has_finished = True
        if arguments.evaluates_at_epochs(args):
            control.should_save = False
        elif self._trainer_handle.can_evaluate(args):
            control.should_evaluate = True

    def _stop(self, state: TrainerState, control: TrainerControl) -> None:
        control.should_training_stop = True
        control.should_save = state.global_step > self._save_schedule.last_step

    def _skip_evaluation(self, args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
        """Skip a stopped run's evaluation, unless no later one makes up for it."""
        if self._leaves_evaluation or not arguments.is_evaluation_due(args, state):
            control.should_evaluate = False

    def _expect(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, otherwise: Phase
    ) -> None:
        """Prepare for the Trainer's next action: evaluate, save, or ``otherwise``."""
        may_save = control.should_save or (arguments.saves_best(args) and control.should_evaluate)
        if may_save or self._save_schedule.is_stale(state.global_step):
            self._save_schedule.prepare(args, state.global_step)
        if control.should_evaluate or control.should_save:
            self._reporter.speed.pause()
            self._telemetry.pause()
        if (
            control.should_evaluate
            and self._leaves_evaluation
            and state.global_step > self._save_schedule.last_step
        ):
            self._save_schedule.now(self._trainer_handle.trainer, args, state, control)
        if control.should_evaluate:
            otherwise = Phase.VALIDATION
        elif control.should_save:
            otherwise = Phase.SAVE
        elif control.should_training_stop or self._has_finished:
            otherwise = Phase.SCRIPT
        # What another callback asks for behind this one shows at its first prediction step.
        self._heartbeat.follow(otherwise, state.global_step)

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_kwargs: Any
    ) -> None:
        """Leave an evaluation that may be left, on all ranks at the same prediction step."""
        del args, control
        if self._in_training:
            self._enter(Phase.VALIDATION, state.global_step)
        if self._leaves_evaluation and self._in_training and self._preemption.agree(state.global_step):
            raise LeaveTrainingError(state.global_step)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002
        logs: Mapping[str, Any] | None = None,
        **_kwargs: Any,
    ) -> None:
        if logs:
            batch_size = self._trainer_handle.train_batch_size(args, state)
            self._reporter.log(logs, state, batch_size, is_stopped=self.is_stopped)
            if kind_of(logs) is LogKind.TRAINING:
                self._telemetry.report(state.global_step, float(state.num_input_tokens_seen), batch_size)
                self._losses.take(logs, state.global_step, state.max_steps)

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_kwargs: Any
    ) -> None:
        """Report a complete evaluation, then follow a stop request that came meanwhile."""
        if not self._in_training or self._trainer_handle.has_one_evaluation_set():
            self._reporter.flush(state)
        if not self._in_training:
            return
        if control.should_training_stop and not self.is_stopped:
            self._has_finished = True
        if not self._has_finished and self._preemption.agree(state.global_step):
            self._stop(state, control)
        self._preemption.start(state.global_step)
        if arguments.saves_best(args) and control.should_save and self._trainer_handle.is_known:
            # After this the Trainer saves what is best only, and training is about to end.
            self._save_schedule.now(self._trainer_handle.trainer, args, state, control, rewrites_later=False)
        elif control.should_save or arguments.saves_best(args):
            self._save_schedule.prepare(args, state.global_step)
        # Other callbacks hear of the evaluation now, or the next of several sets is evaluated.
        self._heartbeat.follow(Phase.SAVE if control.should_save else Phase.SCRIPT, state.global_step)

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002
        **_kwargs: Any,
    ) -> None:
        """Store a checkpoint of the Trainer's files, unless no loss is finite any more."""
        self._reporter.flush(state)
        if not self._losses.is_save_unsafe(state.global_step):
            self._save_schedule.store(
                self._trainer_handle.trainer,
                args,
                state,
                self._trainer_handle.train_batch_size(args, state),
            )
        self._heartbeat.follow(Phase.SCRIPT, state.global_step)

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_kwargs: Any
    ) -> None:
        del args, control
        self._reporter.flush(state)
        self._heartbeat.follow(Phase.BATCH, state.global_step)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_kwargs: Any
    ) -> None:
        """Request the last evaluation and the last checkpoint where training ends."""
        self._reporter.flush(state)
        step = state.global_step
        if control.should_training_stop or step >= state.max_steps:
            self._has_finished = not self.is_stopped
            if self._has_finished and not self._reporter.is_validated(step):
                control.should_evaluate |= self._trainer_handle.can_evaluate(args)
            control.should_save = True
        if self.is_stopped:
            # The Trainer takes a stop for the end of the epoch.
            control.should_training_stop = True
            self._skip_evaluation(args, state, control)
        if step == self._save_schedule.last_step:
            control.should_save = False  # what is stored is not written a second time
        self._disable_eval_and_save(control)
        self._expect(args, state, control, otherwise=Phase.SCRIPT)

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
        """Report how training ended, and close everything. Ranks: all; no communication."""
        if self._in_training and self.is_stopped:
            # To the master, exit code 0 without this means that the trial is complete.
            self._preemption.acknowledge()
        elif self._in_training and self._has_finished:
            self._reporter.finish(step, max_steps)
            self._telemetry.close(is_complete=True)
        self._in_training = False
        self.close()

    def close(self) -> None:
        """Release threads, the hook and the opened checkpoint; idempotent."""
        self._heartbeat.end()
        self._telemetry.close(is_complete=False)
        self._save_schedule.close()
        self._startup.close()
