"""A layout for tests that need some layout, changed with ``dataclasses.replace`` where a test looks."""

from __future__ import annotations

from dstrial.checkpoint.layout import Layout

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
