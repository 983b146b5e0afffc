"""Ranks that are killed in the middle of saves, again and again: what is trained at last is the undisturbed run."""

import pytest
from small_runs import deepspeed_config, experiment, train

pytestmark = pytest.mark.ranks
NUM_KILLS = 4


@pytest.mark.exhaustive("[1]")
@pytest.mark.parametrize("stage", [1, 3])
def test_a_run_whose_ranks_die_in_four_saves_equals_the_undisturbed_one(tmp_path, stage):
    hyperparameters = {"deepspeed_config": deepspeed_config(stage), "noise": 0.1, "num_records": 70}
    config = experiment(hyperparameters, batches=20, checkpoint=3)
    whole = train(tmp_path / "whole", "DataParallelTrial", config, ranks=2)
    assert whole.returncode == 0, whole.output

    run = None
    for kill in range(NUM_KILLS):
        before = run.checkpoints() if run else []
        # Of each attempt the first save is completed, and one of the ranks dies in the second.
        env = {"KILL_IN_SAVE": f"{kill % 2}:2"}
        run = train(tmp_path / "killed", "DataParallelTrial", config, ranks=2, run=run, env=env)
        assert run.returncode == 137, run.output
        assert len(run.checkpoints()) == len(before) + 1
        assert list(run.directory.checkpoints_path.glob("*.saving")) != []
    run = train(tmp_path / "killed", "DataParallelTrial", config, ranks=2, run=run)
    assert run.returncode == 0, run.output

    for group in ("training", "validation"):
        assert run.reports(group) == whole.reports(group)
    assert run.checkpoints() == whole.checkpoints()
    assert len(whole.checkpoints()) >= NUM_KILLS + 2
    # Nothing half-written is left.
    assert len(list(run.directory.checkpoints_path.iterdir())) == len(whole.checkpoints())
