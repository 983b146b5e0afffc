"""How an engine divides ranks and batches, and how its batch sizes are changed."""

from __future__ import annotations

from deepspeed import DeepSpeedEngine, PipelineEngine, comm

from dstrial.checkpoint.layout import Layout
from dstrial.config import ParallelDims
from dstrial.engine.deepspeed_internals import engines, optimizers
from dstrial.errors import ConfigError, ConfigProblem


def dims_of(engine: DeepSpeedEngine) -> ParallelDims:
    is_pipeline = isinstance(engine, PipelineEngine)
    pp = int(engine.grid.get_pipe_parallel_world_size()) if is_pipeline else 1
    tp = max(int(engine.mp_world_size) // pp, 1)  # which counts the stages of a pipeline, too
    world_size = comm.get_world_size()
    sp = max(world_size // (int(engine.dp_world_size) * pp * tp), 1)
    return ParallelDims(world_size, pp, tp, sp, is_pipeline=is_pipeline)


def set_batch_sizes(
    engine: DeepSpeedEngine, *, micro_batch_size: int, micro_batches_per_batch: int, name: str
) -> None:
    """Change micro batch and accumulation of an engine between two optimizer steps.

    DeepSpeed's own two setters change its config. What its parts have copied from there is changed as well: the schedule
    of a pipeline, the optimizer's accumulation, and the records that the throughput timer counts.

    Raises:
        ConfigError: DeepSpeed has made the training loader, with the old micro batch.

    Source: DeepSpeed 0.19.8 ``runtime/engine.py`` and ``runtime/pipe/engine.py``, ``set_train_batch_size``,
        ``set_train_micro_batch_size``; ``gradient_accumulation_steps`` of ``runtime/zero/stage_1_and_2.py`` and
        ``stage3.py``.
    """
    before = int(engine.train_micro_batch_size_per_gpu())
    if engine.training_dataloader is not None and before != micro_batch_size:
        problem = ConfigProblem(
            f"{name}: train_micro_batch_size_per_gpu",
            f"{before}, with which DeepSpeed has made a loader of the training_data given to deepspeed.initialize",
            f"{micro_batch_size}, with which this run goes on",
            f"Set train_micro_batch_size_per_gpu to {micro_batch_size} and gradient_accumulation_steps to "
            f"{micro_batches_per_batch}, or return the loader from build_training_data_loader instead.",
        )
        raise ConfigError([problem])
    unit = int(engine.train_batch_size()) // (before * int(engine.gradient_accumulation_steps()))
    engine.set_train_micro_batch_size(micro_batch_size)
    engine.set_train_batch_size(micro_batch_size * micro_batches_per_batch * int(engine.dp_world_size))
    # Where ranks share a sequence, dp_world_size is not the number that the config's equation has.
    engines.set_train_batch_size(engine, micro_batch_size * micro_batches_per_batch * unit)
    if isinstance(engine, PipelineEngine):
        engine.micro_batch_size = micro_batch_size
    optimizers.set_accumulation(engine.optimizer, micro_batches_per_batch)


def recount_micro_batches(engine: DeepSpeedEngine, saved: Layout, now: Layout) -> None:
    """Recount a loaded engine's micro batches in the current accumulation."""
    if saved.micro_batches_per_batch == now.micro_batches_per_batch:
        return
    engine.micro_steps = int(engine.global_steps) * now.micro_batches_per_batch
    if isinstance(engine, PipelineEngine):
        batches = int(engine.module.micro_offset) // saved.micro_batches_per_batch
        engine.module.micro_offset = batches * now.micro_batches_per_batch
