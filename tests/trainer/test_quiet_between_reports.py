"""Between reports and points of agreement the loop talks to no rank."""

import json

import pytest
from small_runs import deepspeed_config, experiment, train

pytestmark = pytest.mark.ranks


def test_the_loop_talks_only_at_reports_and_points_of_agreement(tmp_path):
    log = tmp_path / "watch"
    hyperparameters = {"deepspeed_config": deepspeed_config(0), "watch_log": str(log), "num_records": 4096}
    config = experiment(hyperparameters, batches=200, report=50, validate=1000, checkpoint=1000)
    run = train(tmp_path, "Watched", config, ranks=2, module="odd_trials")
    assert run.returncode == 0, run.output
    seen = [[json.loads(line) for line in open(f"{log}.{rank}")] for rank in (0, 1)]
    talks = [[(batch, what) for batch, what in rows if batch < 200] for rows in seen]
    assert talks[0] == talks[1]
    batches = [batch for batch, _ in talks[0]]
    assert len(batches) == len(set(batches)), "one exchange per point"
    assert {50, 100, 150} <= set(batches)
    assert len(set(batches) - {50, 100, 150}) <= 12
    begun = {batch for batch, what in talks[0] if what == "begin_allgather"}
    assert {50, 100, 150} <= begun, "nobody waits for another rank at a report"
