"""A run resumed on another number of ranks, or in another ZeRO stage, goes on as if nothing had happened."""

import pathlib

import pytest
from small_runs import deepspeed_config, experiment, train

pytestmark = pytest.mark.ranks

# ranks and ZeRO stage before; after
CHANGES = [((2, 1), (3, 0)), ((2, 3), (1, 2))]


def configured(stage: int, batches: int) -> dict:
    # 84 records: seven batches of 12 in an epoch, so that the run stops in the middle of one.
    sizes = {
        "train_batch_size": 12,
        "train_micro_batch_size_per_gpu": None,
        "gradient_accumulation_steps": None,
    }
    config = {key: value for key, value in deepspeed_config(stage, **sizes).items() if value is not None}
    hyperparameters = {"deepspeed_config": config, "dropout": 0.0, "num_records": 84}
    return experiment(hyperparameters, batches=batches, report=6, validate=6, checkpoint=6)


def losses(run):
    return {batch: values["validation_loss"] for batch, values in run.reports("validation").items()}


@pytest.mark.parametrize(("before", "after"), CHANGES)
def test_the_run_goes_on(tmp_path: pathlib.Path, before, after):
    whole = train(tmp_path / "whole", "DataParallelTrial", configured(before[1], 20), ranks=before[0])
    assert whole.returncode == 0, whole.output
    first = train(tmp_path / "run", "DataParallelTrial", configured(before[1], 10), ranks=before[0])
    assert first.returncode == 0, first.output

    second = train(tmp_path / "run", "DataParallelTrial", configured(after[1], 20), ranks=after[0], run=first)

    assert second.returncode == 0, second.output
    assert "is brought into another layout" in second.output
    assert "resumed from checkpoint" in second.output
    reported = second.reports("training")
    assert list(reported) == [6, 10, 12, 18, 20]
    assert reported[20]["loss"] == pytest.approx(whole.reports("training")[20]["loss"], rel=1e-6)
    wanted = losses(whole)
    assert {batch: losses(second)[batch] for batch in wanted} == pytest.approx(wanted, rel=1e-6)
