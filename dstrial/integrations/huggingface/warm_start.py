"""Take over the weights of another trial's checkpoint, whatever its layout."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch

from dstrial.engine.checkpoint_reader.open import open_saved_engine
from dstrial.engine.checkpoint_reader.saved_engine import MASTER, SavedEngine
from dstrial.engine.deepspeed_internals import optimizers
from dstrial.errors import CheckpointLayoutError
from dstrial.integrations.huggingface.resume import OpenedCheckpoint

_WEIGHTS_NAMES = ("model.safetensors", "model.safetensors.index.json")


def load_weights(model: torch.nn.Module, opened_checkpoint: OpenedCheckpoint) -> None:
    """Take over another trial's weights, before a Trainer wraps the model.

    Args:
        model: the Trainer's, not wrapped; under ZeRO 3 its parameters may be cut over the ranks already.
        opened_checkpoint: the other trial's.

    Raises:
        CheckpointLayoutError: it has no weights that can be read here, or those of another model.

    Ranks: all, collectively (ZeRO 3 gathers one parameter at a time; else no communication).
    """
    source = _saved_weights(opened_checkpoint)
    parameters = dict(model.named_parameters())
    missing = sorted(name for name in parameters if name not in source)
    if missing:
        raise CheckpointLayoutError(
            f"checkpoint {opened_checkpoint.root} has no parameter {missing[0]!r}; expected those of the model. Start from the "
            "weights of the same model, or without them."
        )
    for name, parameter in parameters.items():
        with _whole(parameter):
            if not _is_cut(parameter) or torch.distributed.get_rank() == 0:
                parameter.data.copy_(source[name])
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name in source:
                buffer.copy_(source[name])


class _SavedWeights:
    """Weights by name, read one at a time from a DeepSpeed engine's files."""

    def __init__(self, saved: SavedEngine) -> None:
        self._saved = saved
        self._buffers = saved.buffers()

    def __contains__(self, name: str) -> bool:
        return name in self._saved.places or name in self._buffers

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._buffers[name] if name in self._buffers else self._saved.full(name, MASTER)


def _saved_weights(opened_checkpoint: OpenedCheckpoint) -> Any:
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
    """Put a cut parameter together in the block; all ranks get what rank 0 writes."""
    if not _is_cut(parameter):
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
        yield
