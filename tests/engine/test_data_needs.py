import pytest

from dstrial.engine.data_needs import require_enough
from dstrial.errors import DataError


def test_a_loader_too_short_for_one_step_names_its_ranks() -> None:
    with pytest.raises(DataError) as raised:
        require_enough([8, None, 3, 2], 4, loader="training data loader")
    assert str(raised.value).startswith(
        "training data loader is 3 on rank 2, 2 on rank 3 micro batches long; expected at least 4"
    )


def test_long_enough_loaders_and_unknown_lengths_pass() -> None:
    require_enough([4, None, 5], 4, loader="training data loader")
