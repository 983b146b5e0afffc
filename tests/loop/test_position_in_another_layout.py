"""Where a rank goes on reading, and how many micro batches that is now."""

import dataclasses

import pytest

from dstrial.checkpoint.layout import Layout
from dstrial.errors import CheckpointLayoutError
from dstrial.loop.checkpointing import _position_of, _recounted

LAYOUT = Layout(
    engine_kind="data_parallel",
    world_size=1,
    data_parallel_size=1,
    pipeline_stages=1,
    model_parallel_size=1,
    zero_stage=0,
    offload_optimizer="none",
    offload_parameters="none",
    precision="fp32",
    optimizer="Adam",
    wrapper="",
    lr_scheduler="",
    train_batch_size=24,
    micro_batch_size=6,
    micro_batches_per_batch=4,
    versions={},
    buffers=(),
    parameters=(),
)


def with_accumulation(steps):
    return [dataclasses.replace(LAYOUT, micro_batches_per_batch=steps, micro_batch_size=24 // steps)]


def test_the_position_is_that_of_a_rank_that_reads_data():
    middle = {"micro_batches_drawn": 0}
    reader = {"micro_batches_drawn": 12, "records_per_batch": 24}
    assert _position_of([reader, middle, middle, reader]) == reader
    assert _position_of([middle]) == middle


def test_the_same_accumulation_leaves_the_position_as_it_is():
    state = {"micro_batches_drawn": 3, "else": 1}
    assert _recounted(state, with_accumulation(4), with_accumulation(4)) == state


def test_another_accumulation_counts_the_same_records():
    moved = _recounted({"micro_batches_drawn": 8}, with_accumulation(4), with_accumulation(2))
    assert moved == {"micro_batches_drawn": 4}


def test_a_position_between_two_micro_batches_of_now_is_refused():
    with pytest.raises(CheckpointLayoutError, match="after 3 micro batches of 6 records"):
        _recounted({"micro_batches_drawn": 3}, with_accumulation(4), with_accumulation(2))
