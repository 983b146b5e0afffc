"""Who is which replica, reads records or reports metrics under model parallelism."""

from __future__ import annotations

import dataclasses
from typing import Any

from determined import core


@dataclasses.dataclass
class ModelParallelUnit:
    """The place of this rank in a model-parallel arrangement.

    Build one yourself, and hand it to ``context.set_mpu``, only for model parallelism outside DeepSpeed's
    own: data parallel and pipeline engines get theirs when they are wrapped.

    Attributes:
        data_parallel_rank: which replica this rank belongs to, from 0.
        data_parallel_world_size: number of replicas.
        should_report_metrics: whether what this rank returns from ``train_batch`` and ``evaluate_batch``
            counts. In a pipeline these are the ranks of the last stage, which hold the loss.
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
    """Return the arrangement of a pipeline from its grid (``engine.mpu``).

    Determined lets every stage report; here only the last one does, the one that computed the loss.
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
