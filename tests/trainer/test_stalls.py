"""Stalled ranks: the message with positions and stacks, and the end of the ranks."""

import os
import re
import signal

import pytest
from small_runs import deepspeed_config, experiment, start, train
from waiting import wait_for

pytestmark = pytest.mark.ranks


def stalling_config(batches=30, *, stage=1, timeout=2, action="restart", **hyperparameters):
    given = {"deepspeed_config": deepspeed_config(stage), "num_records": 64, "stall_at": 5, **hyperparameters}
    data = {"dstrial": {"stall_timeout": timeout, "stall_action": action}}
    return experiment(given, batches, report=5, validate=1000, checkpoint=1000, data=data)


def test_stopped_rank_is_named_and_training_continues(tmp_path):
    pid_file = tmp_path / "pid"
    config = stalling_config(timeout=600, action="report", pid_file=str(pid_file))
    process, _, shown = start(
        tmp_path, "stalling_trials:StoppedTrial", config, DSTRIAL_ALLOCATION_DIR=str(tmp_path)
    )
    try:
        wait_for(lambda: "stack of rank 0" in shown.read_text(), deadline_s=120)
        (line,) = re.findall("dstrial.launch: (stalled: rank.*)", shown.read_text())
        pid = int(pid_file.read_text())
        assert line.startswith(
            "stalled: rank 1 is stopped (SIGSTOP) at batch 5 in train_batch; rank 0 waits for it in a collective (all"
        )
        assert f"`kill -CONT {pid}`" in line
        assert "longest batch so far took" in line
        wait_for(lambda: (tmp_path / "stalled.json").exists())
        os.kill(pid, signal.SIGCONT)
        assert process.wait(timeout=120) == 0, shown.read_text()
    finally:
        process.kill()
        process.wait()
    assert "stalled: no longer" in shown.read_text()
    assert not (tmp_path / "stalled.json").exists()


def test_skipped_collective_is_reported_with_both_places(tmp_path):
    run = train(tmp_path, "SkippingTrial", stalling_config(), ranks=2, module="stalling_trials")
    assert run.returncode == 1
    (line,) = re.findall("dstrial.launch: (stalled: .*Nothing has moved.*)", run.output)
    assert "rank 0 is in barrier of train_batch (stalling_trials.py:" in line
    assert "rank 1 is in all" in line
    assert "left a collective out" in line
    assert "failed first (exit code 1" in run.output
    assert "RankStalledError" in run.output or line in run.output.replace("dstrial.launch: ", "", 1)


def test_hanging_loader_is_named_with_rank(tmp_path):
    run = train(
        tmp_path, "SilentLoaderTrial", stalling_config(num_workers=0), ranks=2, module="stalling_trials"
    )
    assert run.returncode == 1
    (line,) = re.findall("dstrial.launch: (stalled: .*Nothing has moved.*)", run.output)
    assert line.startswith("stalled: rank 1 waits for its data loader at batch 5 in train_batch")
    assert "; rank 0 waits for it in a collective (all" in line
    assert "rank 1 failed first" in run.output
    assert "in read_from_storage (stalling_trials.py:" in line


def test_uneven_initial_validation_is_named_and_ended(tmp_path):
    config = stalling_config(stage=3, timeout=1)
    zero = config["hyperparameters"]["deepspeed_config"]["zero_optimization"]
    zero["stage3_param_persistence_threshold"] = 0
    config["perform_initial_validation"] = True
    run = train(tmp_path, "UnevenValidationTrial", config, ranks=2, module="stalling_trials")
    assert run.returncode == 1, run.output
    (line,) = re.findall("dstrial.launch: (stalled: .*Nothing has moved.*)", run.output)
    assert "rank 0 is in all_gather of evaluate_batch (small_trials.py:" in line
    assert "rank 1 is in all" in line
    assert "left a collective out. Nothing has moved for" in line
    assert "no validation has ended so far." in line
    assert "stalled: stack of rank 0" in run.output
    assert "failed first (exit code 1" in run.output


def test_hanging_checkpoint_storage_ends_ranks(tmp_path):
    config = stalling_config(batches=15)
    config["min_checkpoint_period"] = {"batches": 5}
    run = train(tmp_path, "SilentStorageTrial", config, ranks=2, module="stalling_trials")
    assert run.returncode == 1, run.output
    (line,) = re.findall("dstrial.launch: (stalled: .*longest checkpoint.*)", run.output)
    assert "in a checkpoint" in line
