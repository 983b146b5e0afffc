"""``Trainer.train`` that goes on from the trial's checkpoint, whatever its layout."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from deepspeed import DeepSpeedEngine

from dstrial.integrations.huggingface.callback import DetCallback
from dstrial.integrations.huggingface.preemption import LeaveTrainingError
from dstrial.integrations.huggingface.warm_start import load_weights

if TYPE_CHECKING:
    from transformers import Trainer
    from transformers.trainer_utils import TrainOutput


def train(trainer: Trainer, callback: DetCallback, **kwargs: Any) -> TrainOutput:
    """Train, from the trial's checkpoint where there is one.

    On another number of ranks, ZeRO stage or offload the checkpoint is brought into the layout that runs. A checkpoint of
    another trial gives its weights only, and counting starts at 0.

    Args:
        trainer: with ``callback`` among its callbacks, or without: then it is added.
        callback: made with the Trainer's arguments.
        kwargs: further arguments of ``Trainer.train``.

    Returns:
        What ``Trainer.train`` returns. Where nothing was left to train, or an evaluation was left, there is no mean loss: 0.

    Raises:
        ValueError: ``resume_from_checkpoint`` is given as well.
        CheckpointLayoutError: the checkpoint cannot be loaded in this layout.

    Ranks: all, collectively.
    """
    if kwargs.get("resume_from_checkpoint"):
        raise ValueError(
            f"train(resume_from_checkpoint={kwargs['resume_from_checkpoint']!r}); expected the callback's checkpoint, which "
            "train passes itself. Leave it out."
        )
    if callback not in trainer.callback_handler.callbacks:
        trainer.add_callback(callback)
    callback.attach(trainer)
    opened = callback.opened_checkpoint
    kwargs["resume_from_checkpoint"] = callback.checkpoint_path
    with contextlib.ExitStack() as stack:
        stack.callback(callback.close)
        stack.enter_context(_preparing_saves(trainer, callback))
        if opened is not None and not opened.continues:
            load_weights(trainer.model, opened)
            stack.enter_context(_without_model_init(trainer))
        elif opened is not None:
            stack.enter_context(_loading_through(trainer, callback))
        try:
            return trainer.train(**kwargs)
        except LeaveTrainingError as left:
            callback.end(left.step, int(trainer.state.max_steps))
            trainer.is_in_train = False
            return _output(left.step)


def _output(step: int) -> TrainOutput:
    from transformers.trainer_utils import TrainOutput

    return TrainOutput(step, 0.0, {})


@contextlib.contextmanager
def _preparing_saves(trainer: Trainer, callback: DetCallback) -> Iterator[None]:
    """Keep every save of the Trainer from writing into a stored checkpoint.

    Source: transformers 4.56 and 5.23 write ``checkpoint-<step>`` in ``Trainer._save_checkpoint``, called by all ranks.
    """
    had_own = "_save_checkpoint" in vars(trainer)
    save = trainer._save_checkpoint

    def prepare_and_save(*args: Any, **kwargs: Any) -> Any:
        callback.prepare_save(trainer.args, int(trainer.state.global_step))
        return save(*args, **kwargs)

    trainer._save_checkpoint = prepare_and_save
    try:
        yield
    finally:
        if had_own:
            trainer._save_checkpoint = save
        else:
            del trainer._save_checkpoint


@contextlib.contextmanager
def _without_model_init(trainer: Trainer) -> Iterator[None]:
    """Keep the Trainer from making its model anew, without the weights taken over."""
    model_init = trainer.model_init
    trainer.model_init = None
    try:
        yield
    finally:
        trainer.model_init = model_init


@contextlib.contextmanager
def _loading_through(trainer: Trainer, callback: DetCallback) -> Iterator[None]:
    """Have the Trainer's new engine load its checkpoint through the callback.

    Source: transformers 4.56 and 5.23 make the engine with ``accelerator.prepare`` and load it with
        ``integrations.deepspeed.deepspeed_load_checkpoint``, which calls the engine's ``load_checkpoint``.
    """
    accelerator = trainer.accelerator
    prepare = accelerator.prepare

    def prepare_and_bind(*args: Any, **kwargs: Any) -> Any:
        result = prepare(*args, **kwargs)
        for made in result if isinstance(result, tuple) else (result,):
            if isinstance(made, DeepSpeedEngine):
                _bind(made, callback)
        return result

    accelerator.prepare = prepare_and_bind
    try:
        yield
    finally:
        del accelerator.prepare


def _bind(engine: DeepSpeedEngine, callback: DetCallback) -> None:
    """Let the next ``load_checkpoint`` load the trial's; later ones are DeepSpeed's."""

    def load_checkpoint(load_dir: str, *args: Any, **kwargs: Any) -> tuple[str | None, dict[str, Any]]:
        del args, kwargs, engine.load_checkpoint
        callback.load_engine(engine)
        return load_dir, {}

    engine.load_checkpoint = load_checkpoint
