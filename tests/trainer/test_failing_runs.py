"""User code that raises ends all ranks; the log names the batch, the error and the checkpoint to resume from."""

import importlib
import pathlib
import time

import pytest
from in_process_fits import EXP_CONF, fit
from small_runs import deepspeed_config, experiment, train

from dstrial import Batch
from dstrial.errors import TrialContractError

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("definitions_and_runs")]


def wrong(name):
    return getattr(importlib.import_module("wrong_trials"), name)


@pytest.mark.parametrize(
    "method",
    ["on_validation_start", "on_validation_end", "on_training_workload_end", "on_training_epoch_end"],
)
def test_failing_callback_names_batch_and_checkpoint(method, caplog):
    hparams = {"fails_on": [0], "method": method, "num_records": 32}
    periods = {"validation_period": Batch(4), "reporting_period": Batch(4), "checkpoint_period": Batch(3)}
    with pytest.raises(LookupError, match="had enough"):
        fit(wrong("CallbackFails"), hparams, max_length=Batch(8), **periods)
    assert "rank 0 failed at batch 4 of 8 (LookupError: the callback has had enough)" in caplog.text
    assert "resume from the checkpoint of batch 3" in caplog.text
    assert len(list(pathlib.Path("runs").glob("*/*/checkpoints/*/COMPLETE"))) == 1


def test_wrong_metric_at_the_end_keeps_the_checkpoint_and_resumes(caplog):
    with pytest.raises(TrialContractError, match="searcher's metric"):
        fit(wrong("WrongMetric"), checkpoint_period=Batch(2))
    assert "rank 0 failed at batch 4 of 4" in caplog.text
    (run,) = pathlib.Path("runs").glob("*/*/run.json")
    import small_trials

    again = fit(
        small_trials.DataParallelTrial, exp_conf=EXP_CONF, run_dir=run.parent, latest_checkpoint="latest"
    )
    assert again.result.batches_trained == 4
    assert list(again.rows("validation")) == [4]


@pytest.mark.parametrize(
    ("trial", "stage"), [("EvaluationFails", 3), ("EvaluationFails", 0), ("CallbackFails", 0)]
)
def test_error_on_one_rank_ends_all(tmp_path, trial, stage):
    hparams = {
        "deepspeed_config": deepspeed_config(stage),
        "fails_on": [1],
        "method": "on_training_workload_end",
    }
    given = experiment(hparams, batches=4000, report=3, validate=3, checkpoint=4000)
    started_s = time.monotonic()
    done = train(tmp_path, trial, given, ranks=2, module="wrong_trials")
    assert done.returncode == 1, done.output
    assert "rank 1 failed first" in done.output
    assert "rank 1 failed at batch 3 of 4000" in done.output
    assert "there is no checkpoint to resume from" in done.output
    assert done.checkpoints() == []
    assert time.monotonic() - started_s < 90  # the deadline of the ranks is 100 s
