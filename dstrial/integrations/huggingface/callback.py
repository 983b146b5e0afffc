"""``DetCallback``: a Trainer's metrics, checkpoints, progress and stops, told to whoever runs the trial."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import transformers
from deepspeed.runtime.engine import DeepSpeedEngine
from determined import core

from dstrial.errors import CheckpointError, ConfigError, RankError
from dstrial.integrations.huggingface import arguments
from dstrial.integrations.huggingface.context import TrialFacts, saved_run_of
from dstrial.integrations.huggingface.data_wait import DataWait
from dstrial.integrations.huggingface.engine_of import EngineFinder
from dstrial.integrations.huggingface.operation import CurrentOperation
from dstrial.integrations.huggingface.reporting import Reporting
from dstrial.integrations.huggingface.resuming import (
    OpenedCheckpoint,
    directory_for,
    load_engine,
    opened,
)
from dstrial.integrations.huggingface.stopping import Stopping
from dstrial.integrations.huggingface.storing import Kept, Storing

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

logger = logging.getLogger("dstrial.integrations.huggingface")

_MODEL_ONLY = "args.save_only_model is True: checkpoints hold no optimizer, and a trial that is paused cannot go on from them"


class LeaveTrainingError(Exception):
    """Ends ``Trainer.train`` from within a callback; ``train`` of this package catches it.

    Args:
        step: batches trained.
    """

    def __init__(self, step: int) -> None:
        super().__init__(
            f"training is left at step {step}; start it with dstrial.integrations.huggingface.train(trainer, callback), "
            "which ends it in good order"
        )
        self.step = step


class DetCallback(transformers.TrainerCallback):  # type: ignore[misc]  # mypy does not follow transformers
    """Reports metrics and progress, stores checkpoints, stops when asked, and resumes; signature of Determined's.

    Works on a cluster, under the embedded master and outside of any, with the core context of
    :func:`dstrial.integrations.huggingface.init` or of ``det.core.init``. At the end of training, unless it was stopped, there
    is an evaluation (if there is an evaluation set) and a checkpoint.

    A wish to stop (a pause, the searcher's stop, SIGTERM) is followed after a training step, the same one on all ranks: the
    next one, or for steps faster than a second one within about a second. If it comes during an evaluation, that evaluation
    ends first, unless ``leave_evaluation`` is set.

    Args:
        core_context: of the trial.
        args: those of the Trainer; not changed.
        filter_metrics: parts of names; a metric is reported if it has one of them. The searcher's metrics always are. None
            reports all.
        user_data: stored in every checkpoint as ``my_data.json``, if given.
        leave_evaluation: whether a wish to stop ends an evaluation under way. For this a checkpoint is stored before every
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
        self._facts = TrialFacts.of(core_context)
        is_chief = core_context.distributed.rank == 0
        saved = saved_run_of(core_context)
        problems = arguments.problems_of(args, self._facts.searcher, saved, core_context.distributed.size)
        if problems:
            raise ConfigError(problems)
        if getattr(args, "save_only_model", False) and is_chief:
            logger.warning(_MODEL_ONLY)
        length = arguments.length_of(args).value
        self.current_op = CurrentOperation(length, core_context.train, is_chief=is_chief)
        self._stack = contextlib.ExitStack()
        self._opened: OpenedCheckpoint | None = None
        if self._facts.latest_checkpoint is not None:
            self._opened = self._stack.enter_context(
                opened(core_context, self._facts.latest_checkpoint, self._facts.trial_id)
            )
            self._resumed_from = self._stack.enter_context(
                directory_for(self._opened, int(args.train_batch_size))
            )
        weakref.finalize(self, self._stack.close)
        given, limit = arguments.given_of(args), arguments.sizes_of(args).micro_batch_size
        if saved is not None and saved.engines and saved.engines[0].given:
            given, limit = dict(saved.engines[0].given), saved.engines[0].micro_batch_limit
        facts = self._facts
        kept = Kept(facts.trial_id, facts.exp_conf, facts.hparams, user_data, given, limit)
        self._storing = Storing(core_context, kept)
        self._reporting = Reporting(core_context, facts.searcher, filter_metrics)
        self._stopping = Stopping(core_context, facts.signals)
        self._wait = DataWait(core_context.distributed.rank, self._stopping.is_wished_here)
        self._trainer: Any = None
        self._finder: EngineFinder | None = None
        self._in_training = False
        self._last_save = -1

    # ---- what a script asks --------------------------------------------------------------------------

    @property
    def checkpoint_path(self) -> str | None:
        """What ``Trainer.train(resume_from_checkpoint=...)`` has to be given; None for a trial that starts anew."""
        if self._opened is None or not self._opened.continues:
            return None
        return str(self._resumed_from)

    @property
    def is_stopped(self) -> bool:
        """Whether training was asked to end before its length, on all ranks."""
        return self._stopping.reason is not None

    # ---- before training -----------------------------------------------------------------------------

    def attach(self, trainer: Any) -> None:
        """Learn which Trainer it is; ``train`` of this package does so. Ranks: any."""
        self._trainer = trainer

    def load_engine(self, engine: DeepSpeedEngine) -> None:
        """Load the checkpoint into an engine that was just made. Ranks: all, collectively."""
        assert self._opened is not None, "there is a checkpoint to load"
        load_engine(engine, self._opened, self.core_context.distributed)

    @property
    def opened_checkpoint(self) -> OpenedCheckpoint | None:
        """The checkpoint that the trial starts from; None without one."""
        return self._opened

    # ---- the Trainer's events ------------------------------------------------------------------------

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        **_kwargs: Any,
    ) -> None:
        """Make sure that the Trainer goes on where the checkpoint stands."""
        self._require_resumed(state.global_step)
        if self._leaves_evaluation and self._trainer is None:
            raise CheckpointError(
                "leave_evaluation is True with trainer.train(); expected a checkpoint before each evaluation, which a callback "
                "alone cannot store. Write dstrial.integrations.huggingface.train(trainer, callback)."
            )
        self._in_training = True
        if model is not None and self._finder is None:
            self._finder = EngineFinder(model)
        self._storing.begin(arguments.output_dir(args), state.global_step)
        self._reporting.start(state)
        if self._facts.is_rewrite:
            self._rewrite(args, state, control)
        if state.global_step >= state.max_steps > 0:
            if self._trainer is not None:
                raise LeaveTrainingError(state.global_step)
            logger.warning(
                "step %d of %d: nothing is left to train, and Trainer.train() trains a step more; call "
                "dstrial.integrations.huggingface.train(trainer, callback), which does not",
                state.global_step,
                state.max_steps,
            )
        if state.global_step > 0:
            self._last_save = state.global_step
        self._stopping.start()
        self._wait.start()
        if self._leaves_evaluation and arguments.owes_evaluation(args, state):
            self._trainer.evaluate()
        self._wait.begin(state.global_step)

    def _rewrite(self, args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
        """Save what was loaded, and leave before the first batch. Ranks: all, collectively.

        Raises:
            CheckpointError: the script calls ``trainer.train()``, which cannot be left.
        """
        if self._trainer is None:
            raise CheckpointError(
                "trainer.train() is called to write a checkpoint again; expected a training that can be left before its first "
                "batch. Write dstrial.integrations.huggingface.train(trainer, callback) in place of it."
            )
        self._trainer._load_rng_state(self.checkpoint_path)
        self._save_now(args, state, control)
        raise LeaveTrainingError(state.global_step)

    def _require_resumed(self, step: int) -> None:
        found = self._opened
        if found is None:
            return
        if not found.continues:
            if self._trainer is None:
                raise CheckpointError(
                    f"trainer.train() starts without the weights of checkpoint {found.uuid}, which is another trial's; expected "
                    "this trial to begin with them. Write dstrial.integrations.huggingface.train(trainer, callback) in place "
                    "of trainer.train()."
                )
            return
        if step != found.step:
            raise CheckpointError(
                f"trainer.train() starts at step {step}; expected step {found.step} of checkpoint {found.uuid}, from which this "
                "trial goes on. Write dstrial.integrations.huggingface.train(trainer, callback) in place of trainer.train(), "
                "or trainer.train(resume_from_checkpoint=callback.checkpoint_path)."
            )

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_kwargs: Any
    ) -> None:
        """Note that the batch has come."""
        del args, control
        self._wait.end()
        self._reporting.speed.go_on()
        self._reporting.flush(state)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_kwargs: Any
    ) -> None:
        """Report progress, and decide on all ranks whether to stop."""
        step = state.global_step
        self._reporting.progress(step, state.max_steps)
        if self._stopping.beat() and step < state.max_steps:
            control.should_training_stop = True
            control.should_save = step > self._last_save
            if self._leaves_evaluation:
                control.should_evaluate = False
        self._expect(args, state, control)

    def _expect(self, args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
        """Get ready for what the Trainer does next: evaluate, save, or ask for a batch."""
        saves = control.should_save or arguments.saves_best(args)
        if saves:
            self._storing.prepare(arguments.output_dir(args), state.global_step)
        if control.should_evaluate and self._leaves_evaluation and state.global_step > self._last_save:
            self._save_now(args, state, control)
        if control.should_evaluate or control.should_save:
            self._wait.end()
            self._reporting.speed.pause()
        else:
            self._wait.begin(state.global_step)

    def _save_now(self, args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
        """Let the Trainer save before it evaluates. Ranks: all, collectively."""
        self._reporting.speed.pause()
        self._storing.prepare(arguments.output_dir(args), state.global_step)
        self._trainer._save_checkpoint(self._trainer.model_wrapped, None)
        self._trainer.callback_handler.on_save(args, state, control)
        self._stopping.start()

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_kwargs: Any
    ) -> None:
        """Leave an evaluation that may be left, on all ranks at the same of its steps."""
        del args, control
        if self._leaves_evaluation and self._in_training and self._stopping.beat():
            raise LeaveTrainingError(state.global_step)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002
        logs: Mapping[str, Any] | None = None,
        **_kwargs: Any,
    ) -> None:
        """Report training metrics once per step, and take those of an evaluation together."""
        if logs:
            batch_size = self._batch_size(args, state)
            self._reporting.log(logs, state, batch_size, is_stopped=self.is_stopped)

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_kwargs: Any
    ) -> None:
        """Report an evaluation that is complete; stop after it if that was asked for meanwhile."""
        if not self._in_training or self._is_only_evaluation():
            self._reporting.flush(state)
        if not self._in_training:
            return
        if self._stopping.ask() and state.global_step < state.max_steps:
            control.should_training_stop = True
            control.should_save = state.global_step > self._last_save
        if control.should_save or arguments.saves_best(args):
            self._storing.prepare(arguments.output_dir(args), state.global_step)
        self._stopping.start()
        if not control.should_save:
            self._wait.begin(state.global_step)

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002
        **_kwargs: Any,
    ) -> None:
        """Make a checkpoint of what the Trainer has just written."""
        step = state.global_step
        self._reporting.flush(state)
        if step == self._last_save:
            return
        directory = arguments.output_dir(args) / f"checkpoint-{step}"
        self._storing.store(
            directory, step, self._engine(args), arguments.plain_record(args, self._batch_size(args, state))
        )
        self._last_save = step
        self._stopping.start()
        self._wait.begin(step)

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_kwargs: Any
    ) -> None:
        """Note that the first batch of an epoch is asked for."""
        del args, control
        self._reporting.flush(state)
        self._wait.begin(state.global_step)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_kwargs: Any
    ) -> None:
        """Ask for the last evaluation and the last checkpoint where training ends."""
        self._wait.end()
        self._reporting.flush(state)
        step = state.global_step
        is_end = control.should_training_stop or step >= state.max_steps
        if (
            is_end
            and not self.is_stopped
            and not self._reporting.is_validated(step)
            and self._can_evaluate(args)
        ):
            control.should_evaluate = True
        if is_end and step > self._last_save:
            control.should_save = True
        elif step == self._last_save:
            control.should_save = False  # what is stored is not written a second time
        self._expect(args, state, control)

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002
        **_kwargs: Any,
    ) -> None:
        """Say how training ended."""
        del args
        self._reporting.flush(state)
        self.end(state.global_step, state.max_steps)

    def end(self, step: int, max_steps: int) -> None:
        """Close what training needed, and tell the master of a stop before the end. Ranks: all; no communication."""
        if self._in_training and self.is_stopped and step < max_steps:
            # To the master, exit code 0 without this means that the trial is complete.
            self._stopping.acknowledge()
        elif self._in_training and step >= max_steps > 0:
            self._reporting.progress(step, max_steps)
        self._in_training = False
        self.close()

    def close(self) -> None:
        """Give up the thread, the hook and the opened checkpoint; safe to call again."""
        self._wait.stop()
        if self._finder is not None:
            self._finder.close()
        self._stack.close()

    # ---- what is asked of the Trainer ----------------------------------------------------------------

    def _is_only_evaluation(self) -> bool:
        """Whether the evaluation that has ended is all of it; of several sets the last is known by what comes next."""
        return self._trainer is not None and not isinstance(self._trainer.eval_dataset, dict)

    def _can_evaluate(self, args: TrainingArguments) -> bool:
        if self._trainer is not None:
            return self._trainer.eval_dataset is not None
        return arguments.evaluates(args)

    def _engine(self, args: TrainingArguments) -> DeepSpeedEngine | None:
        """Return the engine that trains; None for a Trainer without DeepSpeed.

        Raises:
            RankError: there is one, and it has not been seen.
        """
        if not arguments.is_deepspeed(args):
            return None
        wrapped = getattr(self._trainer, "model_wrapped", None)
        if isinstance(wrapped, DeepSpeedEngine):
            return wrapped
        engine = None if self._finder is None else self._finder.engine
        if engine is None:
            raise RankError(
                "the Trainer was given a DeepSpeed config and has made no forward pass through a DeepSpeed engine; expected "
                "one before its first checkpoint. Do not wrap the model yourself."
            )
        return engine

    def _batch_size(self, args: TrainingArguments, state: TrainerState) -> int:
        if self._trainer is not None:
            return int(self._trainer.get_total_train_batch_size(args))
        micro = int(state.train_batch_size or args.train_batch_size)
        return micro * int(args.gradient_accumulation_steps) * int(args.world_size)
