"""Let DeepSpeed save an engine into copies in memory, to be written later.

``save_checkpoint`` runs as always, barriers included, but files that it writes through its checkpoint engine are copied. What it
writes by itself (``latest``, the conversion script, the swap files of NVMe offload) it writes at once.
"""

from __future__ import annotations

import logging
import pathlib
from typing import Any

import torch
from deepspeed import DeepSpeedEngine, PipelineEngine

from dstrial.engine.async_copy.state_copy import StateCopies
from dstrial.engine.deepspeed_internals import optimizers
from dstrial.engine.deepspeed_internals.engines import (
    CheckpointCommitInfo,
    CheckpointEngine,
    TorchCheckpointEngine,
)
from dstrial.engine.files import describe_rank, engine_files
from dstrial.engine.state import save_engine

logger = logging.getLogger("dstrial.engine")


def copy_engine(
    engine: DeepSpeedEngine, path: str | pathlib.Path, tag: str, copies: StateCopies
) -> tuple[str, ...]:
    """Copy what ``save_engine`` would write, between two optimizer steps.

    An engine whose files DeepSpeed writes by other means than ``torch.save`` (its fast, decoupled or DataStates checkpoint
    engine), or in torch's old format, is saved at once.

    Returns:
        The files, relative to ``path``, that this rank must have there after ``copies.write()``.

    Ranks: all, collectively.
    """
    own = engine.checkpoint_engine
    if type(own) is not TorchCheckpointEngine or not own.zipfile_serialization:
        logger.info("%s writes through DeepSpeed's %s: at once", describe_rank(engine), type(own).__name__)
        save_engine(engine, path, tag)
        return engine_files(engine, tag).written
    # The layers of a pipeline: DeepSpeed would clone each for the file, of which a copy is a second one.
    trims_layers = isinstance(engine, PipelineEngine) and not engine.has_moe_layers
    engine.checkpoint_engine = _CopyingCheckpointEngine(own, copies, trims_layers)
    try:
        engine.save_checkpoint(str(path), tag=tag)
    finally:
        engine.checkpoint_engine = own
    return engine_files(engine, tag).written


def sizes_to_copy(engine: DeepSpeedEngine) -> list[int]:
    """Estimate the bytes of each buffer that ``copy_engine`` needs on this rank."""
    base = optimizers.base_optimizer(engine.optimizer)
    states = [value for state in getattr(base, "state", {}).values() for value in state.values()]
    masters = optimizers.replica_masters(engine.optimizer)
    has_own_file = bool(masters) and engine.save_zero_checkpoint
    written: list[Any] = [*masters, *states] if has_own_file else []
    sizes = []
    if isinstance(engine, PipelineEngine) and not engine.has_moe_layers:
        if engine.grid.get_data_parallel_id() == 0:
            tensors = engine.module.state_dict().values()
            sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
            written += [] if masters else states
    elif engine.save_non_zero_checkpoint:
        written += [*engine.module.state_dict().values(), *([] if masters else states)]
    storages = {
        tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes()
        for tensor in written
        if isinstance(tensor, torch.Tensor)
    }
    return [size for size in [*sizes, *storages.values()] if size >= _WORTH_PREPARING_BYTES]


_WORTH_PREPARING_BYTES = 1 << 16


class _CopyingCheckpointEngine(CheckpointEngine):  # type: ignore[misc]  # deepspeed ships no types
    """Copies what ``TorchCheckpointEngine`` would write with ``torch.save``."""

    def __init__(self, own: TorchCheckpointEngine, copies: StateCopies, trims_layers: bool) -> None:
        self.name = own.name
        self._own = own
        self._copies = copies
        self._trims_layers = trims_layers

    def create(self, info: CheckpointCommitInfo) -> None:
        self._own.create(info)

    def save(self, state_dict: Any, path: str) -> None:
        is_layer = self._trims_layers and pathlib.PurePath(path).name.startswith("layer_")
        self._copies.add(state_dict, str(path), trimmed=is_layer)

    def load(self, path: str, map_location: Any = None) -> Any:
        return self._own.load(path, map_location=map_location)

    def commit(self, info: CheckpointCommitInfo) -> Any:
        return self._own.commit(info)

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        return bool(self._own.is_data_parallel_writer(dp_rank))

    def preserves_storage_sharing(self) -> bool:
        """Whether DeepSpeed clones tensors before saving; here layers are trimmed instead."""
        return not self._trims_layers and bool(self._own.preserves_storage_sharing())
