"""``dstrial doctor --train`` on CPU ranks: success, failed steps and interrupts."""

import json
import os
import signal
import subprocess
import sys

import psutil
import pytest
from waiting import wait_for

from dstrial.doctor.proof import Target, experiment


def doctor(tmp_path, *arguments, **variables):
    command = [sys.executable, "-m", "dstrial.cli", "doctor", "--train", "--output", "out", *arguments]
    environ = {**os.environ, "DS_ACCELERATOR": "cpu", **variables}
    return subprocess.Popen(command, cwd=tmp_path, env=environ, stdout=subprocess.PIPE, text=True)


def steps_of(tmp_path):
    return {
        step["name"]: step for step in json.loads((tmp_path / "out" / "result.json").read_text())["steps"]
    }


# `.ci/run` also runs `dstrial doctor --train`, from the command line.
@pytest.mark.ranks
@pytest.mark.program
@pytest.mark.timeout(400)
def test_doctor_train_completes_all_steps_on_cpu(tmp_path):
    command = doctor(tmp_path, "--minutes", "6", RANK="1", DSTRIAL_RUN_DIR="x", DET_MASTER="y")
    printed, _ = command.communicate()
    assert command.returncode == 0, printed
    found = json.loads((tmp_path / "out" / "result.json").read_text())
    assert found["target"] == {"kind": "cpu", "num_ranks": 2, "precision": "fp32", "is_roomy": False}
    assert [(step["name"], step["status"]) for step in found["steps"]] == [
        ("train and save", "ok"),
        ("resume", "ok"),
        ("reshape", "ok"),
        ("speed and memory", "ok"),
    ]
    assert "equal to the last bit" in printed
    assert "ZeRO 1 -> 3" in printed
    assert "FLOPS per device" in printed
    assert "tensors, MiB" in printed
    assert found["facts"]["telemetry"]["model_tflops_per_device"] > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"], "checkpoints are not kept"


@pytest.mark.process
def test_failing_step_is_reported_independent_steps_continue(tmp_path):
    shadow = tmp_path / "shadow" / "deepspeed"
    shadow.mkdir(parents=True)
    (shadow / "__init__.py").write_text("raise ImportError('no deepspeed but mine')\n")
    command = doctor(tmp_path, PYTHONPATH=str(shadow.parent))
    printed, _ = command.communicate()
    assert command.returncode == 1
    steps = steps_of(tmp_path)
    assert {name: step["status"] for name, step in steps.items()} == {
        "train and save": "failed",
        "speed and memory": "failed",
    }
    assert "no deepspeed but mine" in steps["train and save"]["output"]
    assert "no deepspeed but mine" in printed
    assert "no deepspeed but mine" in (tmp_path / "out" / "train.log").read_text()


HANGING = "import pathlib, os, time\npathlib.Path({!r}).write_text(str(os.getpid()))\ntime.sleep(1000)\n"


@pytest.mark.process
@pytest.mark.parametrize("ends", ["minutes", "interrupt", "kill"])
def test_doctor_timeout_or_signal_ends_all_processes(tmp_path, ends):
    shadow = tmp_path / "shadow" / "torch"
    shadow.mkdir(parents=True)
    note = tmp_path / "pid"
    (shadow / "__init__.py").write_text(HANGING.format(str(note)))
    minutes = "0.3" if ends == "minutes" else "9"
    command = doctor(tmp_path, "--minutes", minutes, PYTHONPATH=str(shadow.parent))
    wait_for(lambda: note.exists() and note.read_text(), "a process that hangs")
    children = psutil.Process(command.pid).children(recursive=True)
    if ends != "minutes":
        command.send_signal(signal.SIGINT if ends == "interrupt" else signal.SIGKILL)
    command.communicate(timeout=60)
    assert command.returncode != 0
    wait_for(lambda: not psutil.pid_exists(int(note.read_text())), "the end of what hung")
    wait_for(
        lambda: not any(child.is_running() and child.status() != "zombie" for child in children),
        "the end of all others",
    )
    if ends == "minutes":
        steps = steps_of(tmp_path)
        assert {step["status"] for step in steps.values()} == {"not reached"}
        assert "--minutes" in steps["train and save"]["what"]


def test_experiment_uses_large_model_and_target_precision():
    config = experiment("speed", Target("cuda", 2, "bf16", is_roomy=True), 1, is_large=True)
    assert config["resources"]["slots_per_trial"] == 2
    assert config["hyperparameters"]["shape"]["width"] == 1024
    engine = config["hyperparameters"]["deepspeed_config"]
    assert engine["bf16"] == {"enabled": True}
    assert engine["train_micro_batch_size_per_gpu"] == 16
    assert "bf16" not in json.dumps(experiment("speed", Target("cuda", 1, "fp32"), 1, is_large=True))
