"""A trial that accumulates by itself trains one batch per call, or is told after the first one."""

import pytest
from small_runs import deepspeed_config, experiment, train


def go(tmp_path, micro_batches, ranks=1):
    given = experiment(
        {"deepspeed_config": deepspeed_config(0), "num_records": 64, "micro_batches": micro_batches},
        batches=3,
    )
    return train(tmp_path, "ByHandTrial", given, ranks=ranks)


@pytest.mark.ranks
@pytest.mark.parametrize(("micro_batches", "ranks"), [(1, 1), (3, 2), (4, 1)])
def test_another_number_of_micro_batches_than_a_batch_has_is_an_error_after_the_first_batch(
    tmp_path, micro_batches, ranks
):
    done = go(tmp_path, micro_batches, ranks)

    assert done.returncode != 0
    assert f"it trained {micro_batches} micro batches on rank 0" in done.output
    assert "expected 2, the gradient_accumulation_steps of the first engine" in done.output
    assert not done.directory.metrics_path.exists() or not done.rows("training")


@pytest.mark.ranks
def test_one_accumulation_per_call_trains(tmp_path):
    done = go(tmp_path, 2)

    assert done.returncode == 0, done.output
    assert list(done.reports("training")) == [3]


@pytest.mark.ranks
@pytest.mark.parametrize("stage", [0, 2])
def test_two_backwards_before_a_step_fail_where_zero_drops_one(tmp_path, stage):
    config = deepspeed_config(stage, gradient_accumulation_steps=1)
    given = experiment({"deepspeed_config": config, "num_records": 64}, batches=3)
    done = train(tmp_path, "TwoLossesTrial", given, ranks=2)

    if stage == 0:
        assert done.returncode == 0, done.output
    else:
        assert done.returncode != 0
        assert "train_batch called backward 2 times before step of an engine with ZeRO stage 2" in done.output
        assert not done.directory.metrics_path.exists() or not done.rows("training")
