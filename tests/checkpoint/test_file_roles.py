"""Layouts in manifests, and counts of their parameters."""

import dataclasses

import pytest
from sample_layouts import PLAIN_LAYOUT

from dstrial.checkpoint.layout import Layout, ParameterPlace
from dstrial.checkpoint.manifest import Manifest, layouts_of
from dstrial.checkpoint.summary import count_parameters, own_places, tied_names
from dstrial.errors import CheckpointError


def place(name: str, **changes: object) -> ParameterPlace:
    plain = ParameterPlace(name, (3, 2), "float32", True, 0, None, 0, 0, False, None, 0, None)
    return dataclasses.replace(plain, **changes)  # type: ignore[arg-type]


def layout(*places: ParameterPlace, **changes: object) -> Layout:
    return dataclasses.replace(PLAIN_LAYOUT, parameters=places, **changes)  # type: ignore[arg-type]


def test_tied_parameters_are_counted_once() -> None:
    tied = layout(
        place("embed"),
        place("head", tied_to="embed"),
        place("frozen", trainable=False, group_idx=None),
        place("left.out", group_idx=None),
        place("embed", tied_to="embed", stage=1, model_part=1),
    )
    counts = count_parameters(tied)
    assert [one.name for one in own_places(tied)] == ["embed", "frozen", "left.out"]
    assert (counts.num_parameters, counts.num_elements) == (3, 18)
    assert (counts.num_frozen, counts.num_frozen_elements, counts.num_not_optimized) == (1, 6, 1)
    assert counts.tied == tied_names(tied) == {"head": "embed"}


def test_count_parameters_sums_model_parallel_slices() -> None:
    cut = layout(place("w"), place("w", model_part=1), model_parallel_size=2)
    assert count_parameters(cut).num_elements == 12


def test_unreadable_layout_error_names_checkpoint() -> None:
    manifest = Manifest(1, "", ({"zero_stage": 1},), {})
    with pytest.raises(CheckpointError, match="checkpoint somewhere describes its layout in another form"):
        layouts_of(manifest, "somewhere")
