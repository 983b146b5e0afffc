"""A rank's replica and roles (reads records, reports metrics) under an mpu."""

from __future__ import annotations

import dataclasses
from typing import Any

from determined import core


@dataclasses.dataclass
class ModelParallelUnit:
    """This rank's replica and roles in a model-parallel job.

    Create one and pass it to ``context.set_mpu`` only for model parallelism outside DeepSpeed. Data-parallel
    and pipeline engines get theirs when they are wrapped.

    Attributes:
        data_parallel_rank: index of this rank's replica, from 0.
        data_parallel_world_size: number of replicas.
        should_report_metrics: whether this rank's results of ``train_batch`` and ``evaluate_batch`` are used. In
        a pipeline this is true on the last stage, which has the loss.
        should_build_data_loader: whether this rank reads records: the first and last stage of a pipeline.
    """

    data_parallel_rank: int
    data_parallel_world_size: int
    should_report_metrics: bool
    should_build_data_loader: bool


def make_data_parallel_mpu(dist_context: core.DistributedContext) -> ModelParallelUnit:
    """Return the unit in which every rank is a replica."""
    return ModelParallelUnit(
        data_parallel_rank=dist_context.get_rank(),
        data_parallel_world_size=dist_context.get_size(),
        should_report_metrics=True,
        should_build_data_loader=True,
    )


def make_deepspeed_mpu(topology: Any) -> ModelParallelUnit:
    """Return the unit of a rank in a pipeline, from its grid (``engine.mpu``).

    Unlike in Determined, only the last stage reports metrics, because it computes the loss.
    """
    stage = topology.get_pipe_parallel_rank()
    last_stage = topology.get_pipe_parallel_world_size() - 1
    is_first_slice = topology.get_slice_parallel_rank() == 0
    return ModelParallelUnit(
        data_parallel_rank=topology.get_data_parallel_rank(),
        data_parallel_world_size=topology.get_data_parallel_world_size(),
        should_report_metrics=stage == last_stage and is_first_slice,
        should_build_data_loader=stage in (0, last_stage) and is_first_slice,
    )
