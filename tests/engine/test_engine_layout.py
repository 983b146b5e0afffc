import dataclasses
from typing import Any

import pytest
from deepspeed_release import needs_0_19_8
from forked_ranks import RunningProgram, of_all_ranks
from sample_layouts import PLACE, PLAIN_LAYOUT

from dstrial.checkpoint.layout import FlatBuffer, Layout
from dstrial.resume.plan import compatible

CASES = [
    "zero 0",
    "zero 1",
    "zero 2, round robin",
    pytest.param("zero 2, aligned", marks=needs_0_19_8),
    "zero 3",
    "zero 3, sub groups",
    "bf16, fp32 accumulation",
    "pipeline, tied",
    "two pipelines",
    "two pipelines, bf16",
]


PROGRAM = ("layout_program", {})


@pytest.mark.ranks
@pytest.mark.parametrize("case", CASES)
def test_layout_is_equal_on_all_ranks(program: RunningProgram, case: str) -> None:
    described = of_all_ranks(program.result(case))
    for rank in described:
        assert rank["layout"] == described[0]["layout"]
        assert rank["survives_json"]
        assert rank["differences"] == []


@pytest.mark.ranks
def test_layout_names_groups_ties_and_frozen_parameters(program: RunningProgram) -> None:
    layout = Layout.from_json(of_all_ranks(program.result("zero 2, round robin"))[0]["layout"])
    places = {place.name: place for place in layout.parameters}
    assert (places["first.weight"].group_idx, places["first.bias"].group_idx) == (0, 1)
    assert places["last.weight"].tied_to == "first.weight"
    assert (places["frozen.weight"].trainable, places["frozen.weight"].buffer_idx) == (False, None)
    assert places["first.weight"].shape == (7, 5)
    assert (layout.zero_stage, layout.data_parallel_size, layout.optimizer) == (2, 2, "AdamW")
    assert (layout.engine_kind, layout.wrapper) == ("data_parallel", "DeepSpeedZeroOptimizer")
    layout = Layout.from_json(of_all_ranks(program.result("pipeline, tied"))[0]["layout"])
    tied = [place for place in layout.parameters if place.name == "tied_modules.shared.weight"]
    assert [(place.stage, place.tied_to) for place in tied] == [(0, None), (1, "tied_modules.shared.weight")]
    assert (layout.engine_kind, layout.pipeline_stages, layout.data_parallel_size) == ("pipeline", 2, 1)


@pytest.mark.ranks
def test_unwritable_directory_is_named_with_rank(program: RunningProgram) -> None:
    named = [result for result in program.result("blocked") if result["error"] == "CheckpointError"]
    assert named
    assert "could not be written by rank 0" in named[0]["message"]
    assert "Not a directory" in named[0]["message"]


def a_layout() -> Layout:
    return dataclasses.replace(
        PLAIN_LAYOUT,
        world_size=2,
        data_parallel_size=2,
        wrapper="DeepSpeedZeroOptimizer",
        train_batch_size=16,
        micro_batch_size=4,
        micro_batches_per_batch=2,
        versions={"deepspeed": "0.19.8"},
        buffers=(FlatBuffer(0, 0, 0, 12, 6, 2),),
        parameters=(dataclasses.replace(PLACE, buffer_idx=0),),
    )


OTHER_PLACE = dataclasses.replace(a_layout().parameters[0], shape=(4, 4))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"world_size": 4}, "number of ranks was 2, is 4"),
        ({"data_parallel_size": 1}, "number of data-parallel replicas was 2, is 1"),
        ({"pipeline_stages": 2}, "number of pipeline stages was 1, is 2"),
        ({"zero_stage": 3}, "ZeRO stage was 1, is 3"),
        ({"offload_optimizer": "cpu"}, "optimizer offload was 'none', is 'cpu'"),
        ({"precision": "bf16"}, "precision was 'fp32', is 'bf16'"),
        ({"optimizer": "SGD"}, "optimizer was 'Adam', is 'SGD'"),
        ({"parameters": ()}, "1 parameters (weight) are new, gone or arranged differently"),
        (
            {"parameters": (OTHER_PLACE, dataclasses.replace(OTHER_PLACE, name="bias"))},
            "2 parameters (bias, weight) are new, gone or arranged differently",
        ),
        ({"buffers": ()}, "the flat buffers are cut differently"),
    ],
)
def test_compatible_describes_difference_in_words(change: dict[str, Any], words: str) -> None:
    (difference,) = compatible(a_layout(), dataclasses.replace(a_layout(), **change))
    assert difference.startswith(words)


def test_compatible_ignores_batch_size_and_versions() -> None:
    now = dataclasses.replace(a_layout(), train_batch_size=32, micro_batches_per_batch=4, versions={})
    assert compatible(a_layout(), now) == []
