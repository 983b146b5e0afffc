"""Report 100, validate 250, checkpoint 300 over 1,000 batches of a 400-batch epoch, killed and resumed in the middle."""

import pytest
from small_runs import deepspeed_config, experiment, train

pytestmark = pytest.mark.ranks


def test_every_boundary_fires_at_its_own_period_and_epochs_begin_once_across_a_resume(tmp_path):
    log = tmp_path / "epochs.log"
    ds_config = deepspeed_config(train_micro_batch_size_per_gpu=1, gradient_accumulation_steps=1)
    hyperparameters = {"deepspeed_config": ds_config, "num_records": 400, "epoch_log": str(log)}
    config = experiment(
        hyperparameters, batches=1000, report=100, validate=250, checkpoint=300, checkpoint_policy="none"
    )
    env = {"KILL_AT": "0:350", "KILL_MARKER": str(tmp_path / "killed")}
    killed = train(tmp_path, "DataParallelTrial", config, env=env)
    assert killed.returncode == 137, killed.output
    resumed = train(tmp_path, "DataParallelTrial", config, run=killed, env=env)
    assert resumed.returncode == 0, resumed.output
    assert list(resumed.reports("training")) == [100, 200, 300, 400, 500, 600, 700, 800, 900, 1000]
    assert list(resumed.reports("validation")) == [250, 500, 750, 1000]
    assert resumed.checkpoints() == [300, 600, 900, 1000]
    assert log.read_text().split("\n")[:-1] == ["start 0", "end 0", "start 1", "end 1", "start 2"]
    at_900 = resumed.reports("training")[900]
    assert (at_900["batch_idx"], at_900["epoch_idx"]) == (sum(range(800, 900)) / 100, 2.0)
    assert [row["epochs"] for row in resumed.reports("validation").values()] == [0, 1, 1, 2]
