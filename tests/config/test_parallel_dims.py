"""How ranks are divided: the arithmetic, and that training counts replicas as the check does."""

import pytest

from dstrial.config.parallel_dims import DIM_KEYS, ParallelDims, replicas_of
from dstrial.errors import ConfigError

TWO_STAGES = {"dstrial": {"pipeline_stages": 2}}


@pytest.mark.parametrize(
    ("data", "asked", "otherwise", "replicas"),
    [
        ({}, None, 1, 8),
        ({}, 4, 1, 2),
        ({}, None, 2, 4),
        (TWO_STAGES, None, 1, 4),
        (TWO_STAGES, 2, 1, 4),
        (TWO_STAGES, None, 8, 4),
        ({"dstrial": {"pipeline_stages": 2, "model_parallel_size": 4}}, None, 1, 1),
        ({"dstrial": {"background_saving": False}}, None, 1, 8),
    ],
)
def test_replicas_are_ranks_over_what_the_config_the_call_or_the_checkpoint_says(
    data, asked, otherwise, replicas
):
    assert replicas_of(data, 8, asked, otherwise=otherwise) == replicas


def test_a_call_that_contradicts_the_config_is_refused():
    with pytest.raises(ConfigError, match=r"is 4, but data\.dstrial says pipeline_stages 2; expected 2"):
        replicas_of(TWO_STAGES, 8, 4)


@pytest.mark.parametrize(("data", "asked"), [({"dstrial": {"pipeline_stages": 3}}, None), ({}, 3)])
def test_ranks_that_cannot_be_divided_are_refused(data, asked):
    with pytest.raises(ConfigError, match="3 ranks per replica on 8 ranks"):
        replicas_of(data, 8, asked)


def test_the_expected_size_of_a_call_leaves_out_the_ranks_of_a_sequence():
    with pytest.raises(
        ConfigError, match=r"is 4, but .* sequence_parallel_size 2; expected 1, pipeline stages"
    ):
        replicas_of({}, 8, 4, config={"sequence_parallel_size": 2})


AUTOTP = {"tensor_parallel": {"autotp_size": 2}}


@pytest.mark.parametrize(
    ("data", "asked", "config", "replicas"),
    [
        # DeepSpeed counts each rank of AutoTP as a replica.
        ({}, None, AUTOTP, 8),
        ({"dstrial": {"model_parallel_size": 2}}, 2, AUTOTP, 8),
        ({}, None, {"sequence_parallel_size": 2}, 4),
        ({}, 1, {"sequence_parallel_size": 4}, 2),
        ({"dstrial": {"model_parallel_size": 2}}, None, {"sequence_parallel_size": 2}, 2),
    ],
)
def test_replicas_follow_the_sizes_in_the_deepspeed_config(data, asked, config, replicas):
    assert replicas_of(data, 8, asked, config=config) == replicas


@pytest.mark.parametrize(
    ("data", "asked", "said"),
    [
        (
            {"dstrial": {"model_parallel_size": 4}},
            None,
            r"model_parallel_size is 4; expected 2, the tensor_parallel",
        ),
        ({}, 4, "is 4, but the DeepSpeed config says model_parallel_size 2; expected 2"),
    ],
)
def test_a_size_that_contradicts_autotp_is_refused(data, asked, said):
    with pytest.raises(ConfigError, match=said):
        replicas_of(data, 8, asked, config=AUTOTP)


def test_the_ranks_are_the_product_of_what_they_are_divided_into():
    dims = ParallelDims(16, pp=2, tp=2, sp=2)
    assert (dims.dp, dims.ranks_per_replica, dims.replicas_on(33), dims.replicas_on(3)) == (2, 8, 4, 1)
    assert dims.on(32).dp == 4
    with pytest.raises(ValueError, match="world_size is 12; expected a multiple of 8"):
        dims.on(12)


def test_one_replica_is_formed_as_the_config_says_and_otherwise_as_before():
    two_stages = ParallelDims.of_replica(pp=2, is_pipeline=True)
    assert two_stages.world_size == 2
    assert two_stages.with_section(None) == two_stages
    assert two_stages.with_section({"model_parallel_size": 3}) == ParallelDims(
        6, pp=2, tp=3, is_pipeline=True
    )
    for nonsense in (0, -2, True, "2", None):
        assert two_stages.with_section({"pipeline_stages": nonsense}) == two_stages


def test_a_layout_says_of_the_ranks_what_they_are_divided_into():
    layout = ParallelDims(8, pp=2, tp=2, is_pipeline=True).to_layout()
    assert list(layout.items()) == [
        ("world_size", 8),
        ("data_parallel_size", 2),
        ("pipeline_stages", 2),
        ("model_parallel_size", 2),
        ("sequence_parallel_size", 1),
    ]
    assert set(DIM_KEYS) < set(layout)


@pytest.mark.parametrize("sizes", [(3, 2, 1), (4, 2, 4), (0, 1, 1), (2, 0, 1)])
def test_sizes_that_do_not_divide_the_ranks_are_refused(sizes):
    with pytest.raises(ValueError, match="expected"):
        ParallelDims(*sizes)
