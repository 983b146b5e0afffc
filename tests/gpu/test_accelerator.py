"""What only an accelerator can show: no device synchronisation between reports, and resuming on the device."""

import os
import pathlib
import subprocess
import sys

import pytest
import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="Requires: [CUDA device]"),
]

# name -> (ZeRO stage, sections of the DeepSpeed config)
CONFIGURATIONS = {
    "fp32 zero 0": (0, {}),
    "bf16 zero 1": (1, {"bf16": {"enabled": True}}),
    "bf16 zero 2": (2, {"bf16": {"enabled": True}}),
    "bf16 zero 3": (3, {"bf16": {"enabled": True}}),
    "fp16 zero 2": (2, {"fp16": {"enabled": True, "initial_scale_power": 8}}),
}


def run(program, *arguments, tmp_path):
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "tests" / "trainer"), str(ROOT)])}
    environ.pop("DS_ACCELERATOR", None)
    done = subprocess.run(
        [sys.executable, str(pathlib.Path(__file__).with_name(program)), *arguments],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_loop_never_synchronises_the_device_between_two_reports(tmp_path):
    """The loop's own share of 40 batches runs under ``set_sync_debug_mode("error")``; DeepSpeed's steps do not."""
    assert "40 batches without a synchronisation" in run("sync_program.py", tmp_path=tmp_path)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_resumed_run_goes_on_like_the_uninterrupted_one(tmp_path, name):
    stage, sections = CONFIGURATIONS[name]
    assert "resumed reports are equal" in run(
        "resume_program.py", str(stage), repr(sections), tmp_path=tmp_path
    )
