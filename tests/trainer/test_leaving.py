"""Ranks that leave training with exit code 0 before its end, and ranks that do not end after it."""

import pytest
from small_runs import deepspeed_config, experiment, train

pytestmark = pytest.mark.ranks


def leaving(how, ranks, leave_at=4):
    given = {"deepspeed_config": deepspeed_config(1), "num_records": 64}
    given |= {"how": how, "leaving_ranks": ranks, "leave_at": leave_at}
    return experiment(given, 12, report=5, validate=1000, checkpoint=1000)


@pytest.mark.exhaustive("[one-sys.exit]", "[all-os._exit]")
@pytest.mark.parametrize("how", ["sys.exit", "os._exit"])
@pytest.mark.parametrize("ranks", [[1], [0, 1]], ids=["one", "all"])
def test_exit_0_in_training_fails_the_rank(tmp_path, how, ranks):
    run = train(tmp_path, "LeavingTrial", leaving(how, ranks), ranks=2, module="leaving_trials")
    assert run.returncode == 1, run.output
    first = "rank 1" if ranks == [1] else "rank "
    assert f"{first}" in run.output.partition(" failed first (exit code")[0].rpartition("\n")[2], run.output
    assert "exit code 0" in run.output
    assert "at batch 4" in run.output
    assert "Connection closed by peer" not in run.output
    if how == "sys.exit":
        assert "leaving_trials.py" in run.output, "the user's line is shown"
        assert "at batch 4 of 12" in run.output


@pytest.mark.parametrize("how", ["sys.exit", "os._exit"])
def test_exit_0_before_training_fails_a_trial(tmp_path, how):
    run = train(tmp_path, "LeavingTrial", leaving(how, [0], -1), module="leaving_trials")
    assert run.returncode == 1, run.output
    assert "rank 0 failed first" in run.output
    assert "exit code 0" in run.output
