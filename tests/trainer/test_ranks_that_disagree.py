"""Ranks that disagree get one clear error, never a hang."""

import re

import pytest
from small_runs import deepspeed_config, experiment, train

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize(
    ("trial", "message"),
    [
        (
            "OtherMetricOnRank1",
            "train_batch returned the metrics ['other'] on rank 1 and ['batch_idx', 'epoch_idx', 'loss']",
        ),
        ("ShorterOnRank1", "batches per epoch are rank 0: 8, rank 1: 6; expected the same on all ranks"),
        ("EndsEarlyOnRank1", "the training loader of rank 1 ended in batch 3, after 6 micro batches"),
    ],
)
def test_disagreement_is_an_error_that_names_the_ranks(tmp_path, trial, message):
    config = experiment({"deepspeed_config": deepspeed_config(0)}, batches=30, report=5)
    run = train(tmp_path, trial, config, ranks=2, module="odd_trials")
    assert run.returncode not in (0, 137), run.output
    assert message in run.output
    assert re.match(r"(\w+\.)*\w+Error: ", run.output.rstrip().splitlines()[-1]), run.output
