"""When a Trainer saves, and which of its saves become checkpoints of the trial."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from deepspeed import DeepSpeedEngine

from dstrial.errors import RankError
from dstrial.integrations.huggingface import arguments
from dstrial.integrations.huggingface.checkpoint_uploader import CheckpointUploader

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments


class SaveSchedule:
    """Stores what the Trainer saves, once for each step; all methods are collective."""

    def __init__(self, uploader: CheckpointUploader) -> None:
        self._uploader = uploader
        self._finder: EngineFinder | None = None
        self._shares = True
        self.last_step = -1

    def begin(self, args: TrainingArguments, state: TrainerState, model: Any) -> None:
        """Record the first step and the model."""
        if model is not None and self._finder is None:
            self._finder = EngineFinder(model)
        self._uploader.begin(arguments.output_dir(args), state.global_step)

    def prepare(self, args: TrainingArguments, step: int) -> None:
        self._uploader.prepare(arguments.output_dir(args), step)

    def is_stale(self, step: int) -> bool:
        return self._uploader.is_stale(step)

    def now(
        self,
        trainer: Any,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        rewrites_later: bool = True,
    ) -> None:
        """Have the Trainer save at once instead of later.

        With ``rewrites_later``, the Trainer calls ``prepare`` before it writes this step's directory again; else the checkpoint
        is a copy that shares no file with it.
        """
        self.prepare(args, state.global_step)
        trainer._save_checkpoint(trainer.model_wrapped, None)
        self._shares = rewrites_later
        try:
            trainer.callback_handler.on_save(args, state, control)
        finally:
            self._shares = True
        if not args.load_best_model_at_end:
            control.should_save = False

    def rewrite(
        self,
        handle: arguments.TrainerHandle,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        checkpoint_path: str,
    ) -> None:
        """Save what was loaded from ``checkpoint_path``, before the first batch."""
        handle.require(
            "trainer.train() is called to write a checkpoint again; expected a training that can be left before its first batch"
        )
        handle.trainer._load_rng_state(checkpoint_path)
        self.now(handle.trainer, args, state, control)

    def store(
        self, trainer: Any, args: TrainingArguments, state: TrainerState, train_batch_size: int
    ) -> bool:
        """Store the Trainer's files, unless the step is stored; ``trainer`` may be None."""
        step = state.global_step
        if step == self.last_step:
            return False
        directory = arguments.output_dir(args) / f"checkpoint-{step}"
        plain = arguments.plain_record(args, train_batch_size)
        self._uploader.store(directory, step, self._engine(trainer, args), plain, shares=self._shares)
        self.last_step = step
        return True

    def close(self) -> None:
        if self._finder is not None:
            self._finder.close()

    def _engine(self, trainer: Any, args: TrainingArguments) -> DeepSpeedEngine | None:
        """Return the engine that trains; None for a Trainer without DeepSpeed."""
        if not arguments.is_deepspeed(args):
            return None
        wrapped = getattr(trainer, "model_wrapped", None)
        if isinstance(wrapped, DeepSpeedEngine):
            return wrapped
        engine = None if self._finder is None else self._finder.engine
        if engine is None:
            raise RankError(
                "the Trainer was given a DeepSpeed config and has made no forward pass through a DeepSpeed engine; expected "
                "one before its first checkpoint. Do not wrap the model yourself."
            )
        return engine


class EngineFinder:
    """Finds the engine around a Trainer's model at its first forward pass.

    The engine is a torch module whose ``module`` is that model, not wrapped. Torch's global hook, which is called for every
    module, is removed once the engine has been found.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._engine: DeepSpeedEngine | None = None
        self._hook: Any = torch.nn.modules.module.register_module_forward_pre_hook(self._on_forward)

    @property
    def engine(self) -> DeepSpeedEngine | None:
        return self._engine

    def close(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _on_forward(self, module: torch.nn.Module, _args: Any) -> None:
        if isinstance(module, DeepSpeedEngine):
            # Others, such as a teacher's in distillation, may be called before it.
            if module.module is self._model:
                self._engine = module
                self.close()
        elif module is self._model:
            self.close()
