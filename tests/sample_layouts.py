"""A sample layout, parameter and saved run, changed with ``dataclasses.replace``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dstrial.checkpoint.layout import Layout, ParameterPlace
from dstrial.resume.metadata import EngineRecord, SavedRun

PLAIN_LAYOUT = Layout(
    engine_kind="data_parallel",
    world_size=4,
    data_parallel_size=4,
    pipeline_stages=1,
    model_parallel_size=1,
    zero_stage=1,
    offload_optimizer="none",
    offload_parameters="none",
    precision="fp32",
    optimizer="Adam",
    wrapper="",
    lr_scheduler="",
    train_batch_size=24,
    micro_batch_size=6,
    micro_batches_per_batch=1,
    versions={},
    buffers=(),
    parameters=(),
)
"""Plain data parallelism: 4 ranks, ZeRO 1, Adam, 24 records a batch."""


PLACE = ParameterPlace(
    name="weight",
    shape=(4, 3),
    dtype="float32",
    trainable=True,
    group_idx=0,
    tied_to=None,
    stage=0,
    model_part=0,
    is_cut=False,
    buffer_idx=None,
    offset=0,
    partition_numel=None,
)
"""A trained parameter without a flat buffer."""


def plain_saved_run(
    *, replicas: int, micro: int, accumulation: int, given: Mapping[str, Any] | None = None
) -> SavedRun:
    """Return a data-parallel run (ZeRO 2, AdamW) that was saved after 10 batches.

    ``given`` has the batch settings of its config, by default ``micro`` and ``accumulation``.
    """
    sizes = {"train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": accumulation}
    engine = EngineRecord(
        engine_kind="data_parallel",
        world_size=replicas,
        data_parallel_size=replicas,
        pipeline_stages=1,
        model_parallel_size=1,
        zero_stage=2,
        offload_optimizer="none",
        offload_parameters="none",
        optimizer="AdamW",
        wrapper="",
        lr_scheduler="",
        train_batch_size=replicas * micro * accumulation,
        micro_batch_size=micro,
        micro_batches_per_batch=accumulation,
        given=dict(given or sizes),
        micro_batch_limit=micro,
    )
    return SavedRun("a-checkpoint", 10, 0, (engine,))
