"""Failing runs: all ranks end, the output has the cause and the newest checkpoint."""

import dataclasses
import importlib
import pathlib
import re
import time

import pytest
from in_process_fits import fit
from small_runs import deepspeed_config, experiment, train

from dstrial import Batch
from dstrial.errors import TrialContractError

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("definitions_and_runs")]


@dataclasses.dataclass(frozen=True)
class Failure:
    """A trial that fails on two ranks, with expected output and complete checkpoints."""

    trial: str
    module: str
    says: tuple[str, ...]
    hparams: dict = dataclasses.field(default_factory=dict)
    stage: int = 0
    accumulation: int = 2
    saved: tuple[int, ...] = ()
    has_reports: bool | None = True


ON_RANK_1 = (
    "rank 1 failed first",
    "rank 1 failed at batch 5 of 4000",
    "there is no checkpoint to resume from",
)
NAN = {"nan_from": 4, "checkpoint_period": 2}
FAILURES = {
    "another metric on rank 1": Failure(
        "OtherMetricOnRank1",
        "odd_trials",
        ("train_batch returned the metrics ['other'] on rank 1 and ['batch_idx', 'epoch_idx', 'loss']",),
        has_reports=False,
    ),
    "a shorter loader on rank 1": Failure(
        "ShorterOnRank1",
        "odd_trials",
        ("batches per epoch are rank 0: 8, rank 1: 6; expected the same on all ranks",),
        has_reports=False,
    ),
    "a loader that ends on rank 1": Failure(
        "EndsEarlyOnRank1",
        "odd_trials",
        ("the training loader of rank 1 ended in batch 3, after 6 micro batches",),
        has_reports=False,
    ),
    "a validation loader on rank 0 only": Failure(
        "NoValidationOnRank1",
        "odd_trials",
        ("build_validation_data_loader returned None on rank 1 and a loader on rank 0",),
        has_reports=False,
    ),
    "too many micro batches by hand": Failure(
        "ByHandTrial",
        "small_trials",
        (
            "it trained 3 micro batches on rank 0",
            "expected 2, the gradient_accumulation_steps of the first engine",
        ),
        {"micro_batches": 3},
        has_reports=False,
    ),
    "two backwards before a step": Failure(
        "TwoLossesTrial",
        "small_trials",
        ("train_batch called backward 2 times before step of an engine with ZeRO stage 2",),
        stage=2,
        accumulation=1,
        has_reports=False,
    ),
    "evaluation raises on rank 1": Failure(
        "EvaluationFails", "wrong_trials", ("KeyError: 'no such label'", *ON_RANK_1), {"fails_on": [1]}
    ),
    "a callback raises on rank 1": Failure(
        "CallbackFails",
        "wrong_trials",
        ("LookupError: the callback has had enough", *ON_RANK_1),
        {"fails_on": [1], "method": "on_training_workload_end"},
        has_reports=None,  # depends on whether rank 0 writes the report before rank 1's callback fails
    ),
    "losses are NaN": Failure(
        "Poisoned", "poisoned_trials", ("since batch 6", "NonFiniteError: "), NAN, stage=1, saved=(2, 4)
    ),
}


@pytest.mark.parametrize("name", FAILURES)
def test_failing_run_ends_all_ranks_with_reason(tmp_path, name):
    failure = FAILURES[name]
    config = deepspeed_config(failure.stage, gradient_accumulation_steps=failure.accumulation)
    given = {"deepspeed_config": config, **failure.hparams}
    checkpoint = given.pop("checkpoint_period", 4000)
    given = experiment(given, batches=4000, report=5, validate=5, checkpoint=checkpoint)
    started_s = time.monotonic()
    done = train(tmp_path, failure.trial, given, ranks=2, module=failure.module)

    assert done.returncode not in (0, 137), done.output
    for words in failure.says:
        assert words in done.output
    assert re.match(r"(\w+\.)*\w+Error: ", done.output.rstrip().splitlines()[-1]), done.output
    assert tuple(done.checkpoints()) == failure.saved
    if failure.saved:
        assert f"resume from the checkpoint of batch {failure.saved[-1]}" in done.output
    has_reports = done.directory.metrics_path.exists() and bool(done.rows("training"))
    assert failure.has_reports in (None, has_reports), "reports from before the error"
    assert time.monotonic() - started_s < 90  # the deadline of the ranks is 100 s


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
    assert "rank 0 failed at batch 4 of 8; resume from the checkpoint of batch 3" in caplog.text
    assert len(list(pathlib.Path("runs").glob("*/*/checkpoints/*/COMPLETE"))) == 1


def test_wrong_metric_at_end_keeps_resumable_checkpoint(caplog):
    with pytest.raises(TrialContractError, match="searcher's metric"):
        fit(wrong("WrongMetric"), checkpoint_period=Batch(2))
    assert "rank 0 failed at batch 4 of 4" in caplog.text
    (run,) = pathlib.Path("runs").glob("*/*/run.json")

    again = fit(run_dir=run.parent, latest_checkpoint="latest")
    assert again.result.batches_trained == 4
    assert list(again.rows("validation")) == [4]
