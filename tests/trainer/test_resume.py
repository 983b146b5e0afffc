"""A run that is killed and resumed reports what the uninterrupted run reports, to the last bit."""

import pytest
from small_runs import deepspeed_config, experiment, train

pytestmark = pytest.mark.ranks

ARRANGEMENTS = [
    ("DataParallelTrial", 0),
    ("DataParallelTrial", 1),
    ("DataParallelTrial", 2),
    ("DataParallelTrial", 3),
    ("PipelineTrial", 0),
    ("PipelineTrial", 1),
]


@pytest.mark.parametrize(("trial", "stage"), ARRANGEMENTS)
def test_a_killed_and_resumed_run_equals_the_uninterrupted_one(tmp_path, trial, stage):
    hyperparameters = {
        "deepspeed_config": deepspeed_config(stage),
        "num_workers": 1,
        "noise": 0.1,
        "num_records": 70,
    }
    config = experiment(hyperparameters, batches=20)
    whole = train(tmp_path / "whole", trial, config, ranks=2)
    assert whole.returncode == 0, whole.output
    env = {"KILL_AT": "1:12", "KILL_MARKER": str(tmp_path / "killed")}
    killed = train(tmp_path / "killed-run", trial, config, ranks=2, env=env)
    assert killed.returncode == 137, killed.output
    assert max(killed.checkpoints()) == 10
    resumed = train(tmp_path / "killed-run", trial, config, ranks=2, run=killed, env=env)
    assert resumed.returncode == 0, resumed.output
    assert "resumed from checkpoint" in resumed.output
    assert list(whole.reports("training")) == [7, 14, 20]
    assert resumed.reports("training") == whole.reports("training")
    assert resumed.reports("validation") == whole.reports("validation")
    assert list(whole.reports("validation")) == [8, 16, 20]
