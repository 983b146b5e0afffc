"""Data positions of a checkpoint that resumes with another layout."""

import dataclasses

import numpy as np
import pytest
import torch
from sample_layouts import PLAIN_LAYOUT

from dstrial.errors import CheckpointLayoutError
from dstrial.loop.checkpoint_loader import position_of, rescale_micro_batches
from dstrial.loop.data.passes import digest


def with_accumulation(steps):
    return [dataclasses.replace(PLAIN_LAYOUT, micro_batches_per_batch=steps, micro_batch_size=24 // steps)]


def test_position_is_taken_from_rank_reading_data():
    middle = {"micro_batches_drawn": 0}
    reader = {"micro_batches_drawn": 12, "records_per_batch": 24}
    assert position_of([reader, middle, middle, reader]) == reader
    assert position_of([middle]) == middle


@pytest.mark.parametrize(("drawn", "now", "expected"), [(3, 4, 3), (8, 2, 4)])
def test_other_accumulation_rescales_micro_batches(drawn, now, expected):
    state = {"micro_batches_drawn": drawn, "else": 1}
    moved = rescale_micro_batches(state, with_accumulation(4), with_accumulation(now))
    assert moved == {"micro_batches_drawn": expected, "else": 1}


def test_position_inside_new_micro_batch_is_rejected():
    with pytest.raises(CheckpointLayoutError, match="after 3 micro batches of 6 records"):
        rescale_micro_batches({"micro_batches_drawn": 3}, with_accumulation(4), with_accumulation(2))


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
