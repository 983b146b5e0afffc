"""Stop by SIGTERM or by user code: all ranks stop after the same batch."""

import json
import signal

import pytest
import torch
from small_runs import Run, deepspeed_config, experiment, start, train
from waiting import wait_for

pytestmark = pytest.mark.ranks


def test_sigterm_before_first_batch_is_no_failure(tmp_path):
    hyperparameters = {"deepspeed_config": deepspeed_config(1), "num_records": 70, "first_batch_s": 600}
    config = experiment(hyperparameters, batches=5)
    process, directory, output = start(tmp_path, "stalling_trials:SlowFirstBatchTrial", config)
    with process:
        wait_for(lambda: "training the first batch" in output.read_text())
        process.send_signal(signal.SIGTERM)
        try:
            assert process.wait(timeout=60) == 128 + signal.SIGTERM
        finally:
            process.kill()
    assert "failed first" not in output.read_text()
    assert Run(directory, "", 0).checkpoints() == []


@pytest.mark.exhaustive("tests/cli/test_run.py::test_trial_is_tested_stopped_and_resumed")
def test_sigterm_stops_ranks_together_and_resume_is_exact(tmp_path):
    hyperparameters = {"deepspeed_config": deepspeed_config(1), "num_records": 70, "batch_sleep_s": 0.02}
    config = experiment(hyperparameters, batches=120, report=10, validate=1000, checkpoint=1000)
    process, directory, output = start(tmp_path, "small_trials:DataParallelTrial", config)
    with process:
        wait_for(lambda: directory.metrics_path.exists() and directory.metrics_path.read_text())
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=120)
    stopped = Run(directory, output.read_text(), process.returncode)
    (at,) = stopped.checkpoints()
    assert 10 <= at < 120
    (mark,) = directory.checkpoints_path.glob("*/COMPLETE")
    states = [torch.load(path, weights_only=False) for path in sorted(mark.parent.glob("dstrial_rank*.pt"))]
    assert [state["progress"]["batches_trained"] for state in states] == [at, at]
    assert json.loads(directory.status_path.read_text())["status"] == "stopped: signal"
    resumed = train(tmp_path, "DataParallelTrial", config, ranks=2, run=stopped)
    assert resumed.returncode == 0, resumed.output
    whole = train(tmp_path / "whole", "DataParallelTrial", config, ranks=2)
    assert resumed.reports("training") == whole.reports("training")
    assert resumed.reports("validation") == whole.reports("validation")
