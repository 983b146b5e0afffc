"""Each batch has a row of its own at W&B."""

from __future__ import annotations

import pytest

from dstrial.loggers.wandb_logger import next_step


@pytest.mark.parametrize(
    ("seen", "batches", "steps"),
    [
        pytest.param(-1, [0, 10, 10, 20], [0, 10, 10, 20], id="a new run"),
        pytest.param(30, [10, 20, 20, 30, 40], [31, 32, 32, 33, 40], id="trained again after a resume"),
        pytest.param(1000, [998, 999, 1000, 1001], [1001, 1002, 1003, 1004], id="each batch reported"),
    ],
)
def test_a_step_is_the_batch_or_the_next_that_is_free(
    seen: int, batches: list[int], steps: list[int]
) -> None:
    step, before, found = seen, None, []
    for batch in batches:
        step = next_step(step, before, batch)
        before = batch
        found.append(step)
    assert found == steps
