"""Data positions of a checkpoint that resumes with another layout."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sample_layouts import PLAIN_LAYOUT

from dstrial.errors import CheckpointLayoutError
from dstrial.loop.checkpoint_loader import position_of, rescale_micro_batches
from dstrial.loop.data.passes import digest
from dstrial.loop.data.training import TrainingStream


def with_accumulation(steps):
    return [dataclasses.replace(PLAIN_LAYOUT, micro_batches_per_batch=steps, micro_batch_size=24 // steps)]


def test_position_is_taken_from_rank_reading_data():
    middle = {"micro_batches_drawn": 0}
    reader = {"micro_batches_drawn": 12, "records_per_batch": 24}
    assert position_of([reader, middle, middle, reader]) == reader
    assert position_of([middle]) == middle


def test_same_accumulation_keeps_position():
    state = {"micro_batches_drawn": 3, "else": 1}
    assert rescale_micro_batches(state, with_accumulation(4), with_accumulation(4)) == state


def test_other_accumulation_rescales_micro_batches():
    moved = rescale_micro_batches({"micro_batches_drawn": 8}, with_accumulation(4), with_accumulation(2))
    assert moved == {"micro_batches_drawn": 4}


def test_position_inside_new_micro_batch_is_rejected():
    with pytest.raises(CheckpointLayoutError, match="after 3 micro batches of 6 records"):
        rescale_micro_batches({"micro_batches_drawn": 3}, with_accumulation(4), with_accumulation(2))


def stream_of(replica, replicas, accumulation):
    adapter = SimpleNamespace(
        data_parallel_rank=replica,
        data_parallel_world_size=replicas,
        micro_batches_per_batch=accumulation,
        micro_batch_size=2,
    )
    return TrainingStream(list(range(16 // replicas)), adapter, replica, 0, True, "reread")


@pytest.mark.parametrize("batches", [1, 4])
def test_converted_position_is_saved_with_new_division(batches):
    before = stream_of(0, 2, 2)
    items = before.open(0)
    for _ in range(2 * batches):
        next(items)
    (written,) = before.positions()
    after = stream_of(1, 4, 1)
    after.open(batches, [written])
    (position,) = after.positions()
    assert (position["replica"], position["division"]) == (1, (4, 1, 2))
    assert (position["pass"], position["in_pass"]) in ((0, batches), (1, 0))


def test_digest_ignores_tensors_without_bytes():
    number = torch.ones(2)
    complex_view = torch.ones(2, dtype=torch.complex64).conj()
    odd = [
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        torch.ones(2, device="meta"),
        torch.eye(2).to_sparse(),
        np.array(["a", "b"], dtype=object),
    ]
    assert digest(odd) is None
    assert digest([number, *odd]) == digest([number])
    assert digest(complex_view) == digest(complex_view.resolve_conj())
    assert digest(complex_view.imag) is not None
