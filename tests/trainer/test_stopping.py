"""Stop by SIGTERM or by user code: all ranks stop after the same batch."""

import json
import os
import signal
import subprocess
import sys

import pytest
import torch
import yaml
from small_runs import DEFINITIONS, Run, deepspeed_config, experiment, train
from waiting import wait_for

from dstrial.local.run_directory import RunDirectory

pytestmark = pytest.mark.ranks


def start(tmp_path, config, trial, **options):
    """Start a trial on two ranks; return process, run directory and output file."""
    config_path = tmp_path / "experiment.yaml"
    config_path.write_text(yaml.safe_dump(config))
    directory = RunDirectory.create(
        tmp_path / "runs", name="small", context_dir=DEFINITIONS, command=["test"], config=config
    )
    command = [sys.executable, "-m", "dstrial.launch", "--slots", "2", "--config", str(config_path)]
    command += ["--context-dir", str(DEFINITIONS), "--trial", trial]
    environ = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "DSTRIAL_RUN_DIR": str(directory.path),
    }
    with (tmp_path / "output").open("w") as output:
        process = subprocess.Popen(command, env=environ, stdout=output, stderr=subprocess.STDOUT)
    return process, directory, tmp_path / "output"


def test_sigterm_before_first_batch_is_no_failure(tmp_path):
    hyperparameters = {"deepspeed_config": deepspeed_config(1), "num_records": 70, "first_batch_s": 600}
    config = experiment(hyperparameters, batches=5)
    process, directory, output = start(tmp_path, config, "stalling_trials:SlowFirstBatchTrial")
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
    process, directory, output = start(tmp_path, config, "small_trials:DataParallelTrial")
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
