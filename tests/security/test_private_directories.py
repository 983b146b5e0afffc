"""Scratch directories are private and are deleted with their process."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from waiting import wait_for

pytestmark = pytest.mark.process

SCRATCH = """
import os, time
from dstrial.scratch import scratch_directory

with scratch_directory("dstrial-test-") as directory:
    (directory / "deep" / "er").mkdir(parents=True)
    (directory / "deep" / "file").write_text("x")
    print(directory, flush=True)
    {wait}
print(directory.exists())
"""
EVENTS = """
import os, stat, sys
{first}
from determined import tensorboard
path = tensorboard.get_base_path({{}})
print(path)
print(oct(stat.S_IMODE(os.stat(path.parent).st_mode)), tensorboard.get_base_path({{}}) == path)
print(tensorboard.get_base_path({{"base_path": "/mine"}}))
if os.fork() == 0:
    print(tensorboard.get_base_path({{}}) != path, flush=True)
    sys.exit()
os.wait()
print(path.parent.exists())
"""


def _environment(tmp_path: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("DSTRIAL_", "DET_"))}
    return {**kept, "TMPDIR": str(tmp_path)}


def _start(program: str, tmp_path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program], env=_environment(tmp_path), stdout=subprocess.PIPE, text=True
    )


def test_scratch_directory_is_deleted_after_block(tmp_path: Path) -> None:
    with _start(SCRATCH.format(wait="pass"), tmp_path) as process:
        printed = process.communicate(timeout=60)[0].split()

    assert printed[1] == "False"
    assert list(tmp_path.iterdir()) == []


def test_scratch_directory_is_deleted_after_sigkill(tmp_path: Path) -> None:
    with _start(SCRATCH.format(wait="time.sleep(600)"), tmp_path) as process:
        assert process.stdout is not None
        directory = Path(process.stdout.readline().strip())
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        # The process that deletes the directory afterwards is in another process group, out of Ctrl-C's reach.
        process.send_signal(signal.SIGKILL)
        process.wait()

    wait_for(lambda: list(tmp_path.iterdir()) == [], "deletion of a killed process's directory")


def test_detached_run_event_files_are_private_and_deleted(tmp_path: Path) -> None:
    with _start(EVENTS.format(first="import dstrial"), tmp_path) as process:
        path, mode, given, of_fork, is_there = process.communicate(timeout=120)[0].splitlines()

    assert Path(path).parent.parent == tmp_path
    assert (mode, given, of_fork, is_there) == ("0o700 True", "/mine/tensorboard--0", "True", "True")
    assert list(tmp_path.iterdir()) == []
