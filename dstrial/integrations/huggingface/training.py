"""Run a Trainer from a checkpoint of any trial, written by any number of ranks."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from deepspeed import DeepSpeedEngine
from transformers.trainer_utils import TrainOutput

from dstrial.engine.checkpoint_reader.open import open_saved_engine
from dstrial.engine.checkpoint_reader.saved_engine import MASTER, SavedEngine
from dstrial.engine.deepspeed_internals import optimizers
from dstrial.engine.frozen_parameters import checksum, require_same_frozen
from dstrial.engine.parameter_names import named_buffers, plain_name
from dstrial.errors import CheckpointLayoutError
from dstrial.integrations.huggingface.callback import DetCallback, LeaveTrainingError
from dstrial.integrations.huggingface.resume import OpenedCheckpoint

if TYPE_CHECKING:
    from transformers import Trainer

_WEIGHTS_NAMES = ("model.safetensors", "model.safetensors.index.json")


def train(trainer: Trainer, callback: DetCallback, **kwargs: Any) -> TrainOutput:
    """Call ``Trainer.train``, resuming from the trial's checkpoint if it has one.

    For another number of ranks, ZeRO stage or offload, the checkpoint is resharded. From another trial's checkpoint only the
    weights are loaded, and steps count from 0.

    Args:
        trainer: the Trainer; ``callback`` is added if it is not among the Trainer's callbacks.
        callback: the callback, created with the Trainer's arguments.
        kwargs: further arguments of ``Trainer.train``.

    Returns:
        The result of ``Trainer.train``; its loss is 0 if nothing was left to train.

    Raises:
        ValueError: ``resume_from_checkpoint`` is given.
        CheckpointLayoutError: the checkpoint cannot be converted to this rank layout.

    Ranks: all, collectively.
    """
    if kwargs.get("resume_from_checkpoint"):
        raise ValueError(
            f"train(resume_from_checkpoint={kwargs['resume_from_checkpoint']!r}); expected the callback's checkpoint, which "
            "train passes itself. Leave it out."
        )
    if callback not in trainer.callback_handler.callbacks:
        trainer.add_callback(callback)
    callback.trainer = trainer
    opened = callback.startup.opened
    kwargs["resume_from_checkpoint"] = callback.checkpoint_path
    with contextlib.ExitStack() as stack:
        stack.callback(callback.close)
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
            return TrainOutput(left.step, 0.0, {})


@contextlib.contextmanager
def _without_model_init(trainer: Trainer) -> Iterator[None]:
    """Disable ``model_init`` in the ``with`` block; it would replace the loaded model."""
    model_init = trainer.model_init
    trainer.model_init = None
    try:
        yield
    finally:
        trainer.model_init = model_init


@contextlib.contextmanager
def _loading_through(trainer: Trainer, callback: DetCallback) -> Iterator[None]:
    """Make engines created in the ``with`` block load the callback's checkpoint.

    Source: transformers 4.56 and 5.23 create the engine with ``accelerator.prepare``, then call its ``load_checkpoint`` in
        ``integrations.deepspeed.deepspeed_load_checkpoint``.
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
    """Make the engine's next ``load_checkpoint`` load the callback's checkpoint."""

    def load_checkpoint(load_dir: str, *args: Any, **kwargs: Any) -> tuple[str | None, dict[str, Any]]:
        del args, kwargs, engine.load_checkpoint
        callback.startup.load_engine(engine)
        return load_dir, {}

    engine.load_checkpoint = load_checkpoint


def load_weights(model: torch.nn.Module, opened_checkpoint: OpenedCheckpoint) -> None:
    """Load another trial's weights into an unwrapped model. Ranks: all, collectively.

    Parameters that ZeRO 3 has already partitioned are gathered one at a time.
    """
    source = _saved_weights(opened_checkpoint)
    parameters = {plain_name(name): parameter for name, parameter in model.named_parameters()}
    missing = sorted(name for name in parameters if name not in source)
    if missing:
        raise CheckpointLayoutError(
            f"checkpoint {opened_checkpoint.root} has no parameter {missing[0]!r}; expected those of the model. Start from the "
            "weights of the same model, or without them."
        )
    saved = opened_checkpoint.layouts[0] if opened_checkpoint.layouts else None
    left_out = {} if saved is None else saved.frozen_checksums
    dtypes = {} if saved is None else {place.name: getattr(torch, place.dtype) for place in saved.parameters}
    built: dict[str, str] = {}
    for name, parameter in parameters.items():
        with _whole(parameter):
            if name in left_out:
                built[name] = checksum(parameter.to(dtypes[name]))
            elif not _is_cut(parameter) or torch.distributed.get_rank() == 0:
                parameter.data.copy_(source[name])
    if saved is not None:
        require_same_frozen(saved, built)
    with torch.no_grad():
        for name, buffer in named_buffers(model).items():
            if name in source:
                buffer.copy_(source[name])


class _SavedWeights:
    """Mapping of names to a saved engine's unsharded parameters and buffers.

    A parameter is read from the checkpoint when it is accessed.
    """

    def __init__(self, saved: SavedEngine) -> None:
        self._saved = saved
        self._buffers = saved.buffers()

    def __contains__(self, name: str) -> bool:
        return name in self._saved.places or name in self._buffers

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._buffers[name] if name in self._buffers else self._saved.full(name, MASTER)


def _saved_weights(opened_checkpoint: OpenedCheckpoint) -> Any:
    """Return a mapping of names to the checkpoint's unsharded parameters and buffers."""
    if opened_checkpoint.layouts:
        saved = open_saved_engine(
            opened_checkpoint.root,
            0,
            opened_checkpoint.layouts[0],
            trusts_code=opened_checkpoint.trusts_code,
        )
        return _SavedWeights(saved)
    directory = opened_checkpoint.trainer_directory
    names = [name for name in _WEIGHTS_NAMES if (directory / name).is_file()]
    if not names:
        raise CheckpointLayoutError(
            f"checkpoint {directory} has no {_WEIGHTS_NAMES[0]}; expected the weights of another trial in it. Start from a "
            "checkpoint that dstrial wrote, or without one."
        )
    from safetensors.torch import load_file

    weights: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob("model*.safetensors")):
        weights |= load_file(path)
    return weights


def _is_cut(parameter: torch.nn.Parameter) -> bool:
    return optimizers.is_cut(parameter) and math.prod(optimizers.full_shape(parameter)) > 0


@contextlib.contextmanager
def _whole(parameter: torch.nn.Parameter) -> Iterator[None]:
    """Gather a parameter that ZeRO 3 has partitioned, inside the ``with`` block.

    After the block, rank 0's values are partitioned again. A no-op if the parameter is not partitioned.
    """
    if not _is_cut(parameter):
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
        yield
