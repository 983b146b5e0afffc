"""What user code raises at a report or a validation costs no training: the state is saved first, where ranks agree."""

import importlib
import json
import pathlib
import time

import pytest
from in_process_fits import fit
from small_runs import deepspeed_config, experiment, train

from dstrial import Batch
from dstrial.errors import TrialContractError

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("definitions_and_runs")]


def wrong(name):
    return getattr(importlib.import_module("wrong_trials"), name)


def saved():
    (mark,) = pathlib.Path("runs").glob("*/*/checkpoints/*/COMPLETE")
    return json.loads(mark.read_text())["steps_completed"]


def test_a_wrong_metric_at_the_end_loses_nothing_and_the_run_goes_on():
    with pytest.raises(TrialContractError, match="searcher's metric"):
        fit(wrong("WrongMetric"))
    assert saved() == 4
    (run,) = pathlib.Path("runs").glob("*/*/run.json")
    import small_trials

    again = fit(small_trials.DataParallelTrial, run_dir=run.parent, latest_checkpoint="latest")
    assert again.result.batches_trained == 4
    assert list(again.rows("validation")) == [4]


@pytest.mark.parametrize(
    "method",
    ["on_validation_start", "on_validation_end", "on_training_workload_end", "on_training_epoch_end"],
)
def test_a_callback_that_raises_loses_nothing(method):
    with pytest.raises(LookupError, match="had enough"):
        fit(
            wrong("CallbackFails"),
            {"fails_on": [0], "method": method, "num_records": 32},
            validation_period=Batch(4),
            reporting_period=Batch(4),
            max_length=Batch(8),
        )
    assert saved() == 4


@pytest.mark.parametrize(("fails_on", "stage"), [([0, 1], 3), ([1], 0)])
def test_ranks_that_can_agree_save_together(tmp_path, fails_on, stage):
    hparams = {"deepspeed_config": deepspeed_config(stage), "fails_on": fails_on}
    given = experiment(hparams, batches=20, validate=3, checkpoint=100)
    done = train(tmp_path, "EvaluationFails", given, ranks=2, module="wrong_trials")
    assert done.returncode == 1, done.output
    assert done.checkpoints() == [3], done.output
    assert done.output.rstrip().splitlines()[-1] == "KeyError: 'no such label'"
    assert f"rank {fails_on[0]} failed first" in done.output or len(fails_on) == 2
    assert "saved before" in done.output


def test_a_callback_that_raises_on_one_rank_alone_ends_all_ranks(tmp_path):
    hparams = {
        "deepspeed_config": deepspeed_config(0),
        "fails_on": [1],
        "method": "on_training_workload_end",
    }
    given = experiment(hparams, batches=4000, report=3, validate=4000, checkpoint=4000)
    started_s = time.monotonic()
    done = train(tmp_path, "CallbackFails", given, ranks=2, module="wrong_trials")
    assert done.returncode == 1, done.output
    assert "rank 1 failed first" in done.output
    assert "LookupError: the callback has had enough" in done.output
    assert done.checkpoints() == []
    assert time.monotonic() - started_s < 90  # the deadline of the ranks is 100 s
