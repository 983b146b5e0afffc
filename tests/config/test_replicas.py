"""Training counts replicas as the check does."""

import pytest

from dstrial.config.replicas import replicas_of
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
