"""Roles of checkpoint files, and sums of sizes and parameters by role and rank."""

import dataclasses

import pytest
from sample_layouts import PLAIN_LAYOUT

from dstrial.checkpoint.file_roles import FileRole, layouts_of, role_of
from dstrial.checkpoint.layout import Layout, ParameterPlace
from dstrial.checkpoint.manifest import FileEntry, Manifest
from dstrial.checkpoint.summary import count_parameters, own_places, size_by_kind, size_by_rank, tied_names
from dstrial.errors import CheckpointError


def place(name: str, **changes: object) -> ParameterPlace:
    plain = ParameterPlace(name, (3, 2), "float32", True, 0, None, 0, 0, False, None, 0, None)
    return dataclasses.replace(plain, **changes)  # type: ignore[arg-type]


def layout(*places: ParameterPlace, **changes: object) -> Layout:
    return dataclasses.replace(PLAIN_LAYOUT, parameters=places, **changes)  # type: ignore[arg-type]


PIPELINE = layout(
    place("0.weight"),
    place("3.weight", stage=1, model_part=1),
    engine_kind="pipeline",
    data_parallel_size=2,
    pipeline_stages=2,
)


@pytest.mark.parametrize(
    ("path", "role"),
    [
        ("dstrial_rank3.pt", FileRole("rank state", None, 3)),
        ("load_data.json", FileRole("configuration")),
        ("code/model_def.py", FileRole("code")),
        ("model0/mp_rank_00_model_states.pt", FileRole("weights", 0, 0)),
        ("model0/zero_pp_rank_2_mp_rank_00_optim_states.pt", FileRole("optimizer", 0, 2)),
        ("model0/bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt", FileRole("optimizer", 0, 3)),
        ("model0/zero_pp_rank_1_mp_rank_00_model_states.pt", FileRole("weights", 0, 1)),
        ("model1/zero_pp_rank_1_mp_rank_01_optim_states.pt", FileRole("optimizer", 1, 3)),
        ("model1/mp_rank_01_model_states.pt", FileRole("weights", 1, 2)),
        ("model1/layer_00-model_states.pt", FileRole("weights", 1, 0)),
        ("model1/layer_03-model_00-model_states.pt", FileRole("weights", 1, 2)),
        ("model1/layer_02-model_states.pt", FileRole("weights", 1, None)),
        ("model2/mp_rank_00_model_states.pt", FileRole("weights", 2, None)),
        ("model0/own.bin", FileRole("other", 0, None)),
        ("zero_to_fp32.py", FileRole("other")),
    ],
)
def test_role_of_follows_file_name(path: str, role: FileRole) -> None:
    assert role_of(path, [layout(), PIPELINE]) == role


def test_sizes_are_summed_by_kind_and_rank() -> None:
    sizes = {
        "dstrial_rank0.pt": 1,
        "dstrial_rank1.pt": 2,
        "model0/mp_rank_00_model_states.pt": 4,
        "latest": 8,
    }
    manifest = Manifest(1, "", (), {path: FileEntry(size, "") for path, size in sizes.items()})
    assert size_by_kind(manifest, [layout()]) == {
        "weights": {"files": 1, "bytes": 4},
        "rank state": {"files": 2, "bytes": 3},
        "other": {"files": 1, "bytes": 8},
    }
    assert size_by_rank(manifest, [layout()]) == {0: 5, 1: 2}


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
