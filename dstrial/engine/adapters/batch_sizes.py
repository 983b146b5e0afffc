"""Read an engine's parallel dimensions; change its batch sizes when a run resumes."""

from __future__ import annotations

from deepspeed import DeepSpeedEngine, PipelineEngine, comm

from dstrial.checkpoint.layout import Layout
from dstrial.config.parallel_dims import ParallelDims
from dstrial.engine.deepspeed_internals import engines, optimizers
from dstrial.errors import ConfigError, ConfigProblem


def dims_of(engine: DeepSpeedEngine) -> ParallelDims:
    """Return the sizes of an engine's parallel axes."""
    is_pipeline = isinstance(engine, PipelineEngine)
    pp = int(engine.grid.get_pipe_parallel_world_size()) if is_pipeline else 1
    tp = max(int(engine.mp_world_size) // pp, 1)  # mp_world_size includes pipeline stages
    sp = int(engine.sequence_parallel_size)
    ep = max(engines.expert_parallel_size(engine), 1)
    return ParallelDims(comm.get_world_size(), pp, tp, sp, ep, is_pipeline)


def set_batch_sizes(
    engine: DeepSpeedEngine, *, micro_batch_size: int, micro_batches_per_batch: int, name: str
) -> None:
    """Change an engine's micro batch size and gradient accumulation steps.

    Call between two optimizer steps. Also updates the pipeline's schedule, the optimizer's accumulation steps, and the
    throughput timer's batch size. DeepSpeed's own setters change only the config, and fail if sequence parallelism leaves
    ``dp_world_size`` unset. ``name`` is the engine's name for error messages.

    Raises:
        ConfigError: DeepSpeed has already created its training loader with the old micro batch size.

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
    engines.set_batch_sizes(
        engine, micro_batch_size * micro_batches_per_batch * unit, micro_batch_size, micro_batches_per_batch
    )
    if isinstance(engine, PipelineEngine):
        engine.micro_batch_size = micro_batch_size
        engine.micro_batches = micro_batches_per_batch
    optimizers.set_accumulation(engine.optimizer, micro_batches_per_batch)


def recount_micro_batches(engine: DeepSpeedEngine, saved: Layout, now: Layout) -> None:
    """Convert a loaded engine's micro batch counters to its new accumulation steps.

    ``saved`` is the layout in the checkpoint, ``now`` that of the engine. A no-op if both have equal accumulation steps.
    """
    if saved.micro_batches_per_batch == now.micro_batches_per_batch:
        return
    engine.micro_steps = int(engine.global_steps) * now.micro_batches_per_batch
    if isinstance(engine, PipelineEngine):
        batches = int(engine.module.micro_offset) // saved.micro_batches_per_batch
        engine.module.micro_offset = batches * now.micro_batches_per_batch
