"""Division of ranks into data, pipeline, tensor and sequence parallelism."""

import pytest

from dstrial.config.parallel_dims import DIM_KEYS, ParallelDims, replicas_of
from dstrial.errors import ConfigError

TWO_STAGES = {"dstrial": {"pipeline_stages": 2}}


AUTOTP = {"tensor_parallel": {"autotp_size": 2}}
SEQUENCE = {"sequence_parallel_size": 2}
BY_TWO = {"dstrial": {"model_parallel_size": 2}}


@pytest.mark.parametrize(
    ("data", "asked", "otherwise", "config", "replicas"),
    [
        ({}, None, 1, None, 8),
        ({}, 4, 1, None, 2),
        ({}, None, 2, None, 4),
        (TWO_STAGES, None, 1, None, 4),
        (TWO_STAGES, 2, 1, None, 4),
        (TWO_STAGES, None, 8, None, 4),
        ({"dstrial": {"pipeline_stages": 2, "model_parallel_size": 4}}, None, 1, None, 1),
        ({"dstrial": {"background_saving": False}}, None, 1, None, 8),
        # DeepSpeed counts each rank of AutoTP as a replica.
        ({}, None, 1, AUTOTP, 8),
        (BY_TWO, 2, 1, AUTOTP, 8),
        ({}, None, 1, SEQUENCE, 4),
        ({}, 1, 1, {"sequence_parallel_size": 4}, 2),
        (BY_TWO, None, 1, SEQUENCE, 2),
    ],
)
def test_replicas_are_ranks_divided_by_replica_size(data, asked, otherwise, config, replicas):
    assert replicas_of(data, 8, asked, otherwise=otherwise, config=config) == replicas


@pytest.mark.parametrize(
    ("data", "asked", "config", "said"),
    [
        (TWO_STAGES, 4, None, "is 4, but the configs say pipeline_stages 2; expected the same"),
        ({"dstrial": {"pipeline_stages": 3}}, None, None, "3 ranks per replica on 8 ranks"),
        ({}, 3, None, "3 ranks per replica on 8 ranks"),
        # ``asked`` counts the ranks of pipeline and tensor parallelism, not of sequence parallelism.
        ({}, 4, SEQUENCE, "is 4, but the configs say sequence_parallel_size 2"),
        (
            {"dstrial": {"model_parallel_size": 4}},
            *(None, AUTOTP, r"model_parallel_size is 4; expected 2, the tensor_parallel"),
        ),
        ({}, 4, AUTOTP, "is 4, but the configs say model_parallel_size 2"),
    ],
)
def test_contradicting_parallel_sizes_are_rejected(data, asked, config, said):
    with pytest.raises(ConfigError, match=said):
        replicas_of(data, 8, asked, config=config)


def test_world_size_is_product_of_dims():
    dims = ParallelDims(16, pp=2, tp=2, sp=2)
    assert (dims.dp, dims.ranks_per_replica, dims.replicas_on(33), dims.replicas_on(3)) == (2, 8, 4, 1)
    assert dims.on(32).dp == 4
    with pytest.raises(ValueError, match="world_size is 12; expected a multiple of 8"):
        dims.on(12)


def test_with_section_changes_only_valid_sizes():
    two_stages = ParallelDims.of_replica(pp=2, is_pipeline=True)
    assert two_stages.world_size == 2
    assert two_stages.with_section(None) == two_stages
    assert two_stages.with_section({"model_parallel_size": 3}) == ParallelDims(
        6, pp=2, tp=3, is_pipeline=True
    )
    for nonsense in (0, -2, True, "2", None):
        assert two_stages.with_section({"pipeline_stages": nonsense}) == two_stages


def test_to_layout_has_every_parallel_size():
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
def test_sizes_not_dividing_world_size_are_rejected(sizes):
    with pytest.raises(ValueError, match="expected"):
        ParallelDims(*sizes)
