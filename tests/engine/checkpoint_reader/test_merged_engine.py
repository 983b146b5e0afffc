"""Slicing a checkpoint of AutoTP ranks for another tensor-parallel size."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from sample_layouts import PLACE, PLAIN_LAYOUT

from dstrial.checkpoint.layout import Layout
from dstrial.engine.checkpoint_reader.open import MergedEngine
from dstrial.engine.checkpoint_reader.saved_engine import MASTER, SavedEngine

WHOLE = torch.arange(24.0).reshape(4, 6)


def layout(size: int, dim: int | None) -> Layout:
    shape = [4, 6]
    if dim is not None:
        shape[dim] //= size
    place = dataclasses.replace(PLACE, shape=tuple(shape), tensor_dim=dim)
    parts = tuple(dataclasses.replace(place, model_part=part) for part in range(size))
    return dataclasses.replace(PLAIN_LAYOUT, zero_stage=0, model_parallel_size=size, parameters=parts)


class Part(SavedEngine):
    """A tensor-parallel rank's state in memory."""

    def __init__(self, layout: Layout, part: int) -> None:
        super().__init__("nowhere", "model", layout.of_part(part))
        dim = self.place("weight").tensor_dim
        self.slice = WHOLE if dim is None else WHOLE.chunk(layout.model_parallel_size, dim)[part]

    def full(self, name: str, key: str = MASTER) -> torch.Tensor:
        del name, key
        return self.slice


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((2, 0), (1, None)),
        ((1, None), (2, 1)),
        ((2, 1), (3, 1)),
        ((2, None), (2, None)),
        # AutoTP slices the parameter for only one of the two sizes.
        ((2, 0), (4, None)),
        ((2, None), (4, 0)),
    ],
)
def test_each_rank_gets_its_slice(before: Any, after: Any) -> None:
    saved, now = layout(*before), layout(*after)
    parts = [Part(saved, part) for part in range(before[0])]
    for part in range(after[0]):
        wanted = WHOLE if after[1] is None else WHOLE.chunk(after[0], after[1])[part]
        out = torch.empty(wanted.numel())
        MergedEngine(parts, saved, now, part).copy("weight", MASTER, 0, out)
        assert torch.equal(out.reshape(wanted.shape), wanted)
