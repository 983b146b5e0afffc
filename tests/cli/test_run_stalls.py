"""``dstrial run`` reports that the master is stopped instead of waiting in silence."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from waiting import wait_for

from dstrial.testing.master import MasterForTest, master_for_test

pytestmark = pytest.mark.process

TRAIN = """
import time
import determined as det
with det.core.init(tensorboard_mode=det.core.TensorboardMode.MANUAL) as core:
    for step in range(1, 601):
        core.train.report_validation_metrics(step, {"score": 1.0 / step})
        print("step", step, flush=True)
        time.sleep(0.1)
"""
SINGLE = {"name": "single", "metric": "score", "max_length": {"batches": 600}}


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MasterForTest]:
    with master_for_test(tmp_path_factory.mktemp("stalls"), num_slots=1) as running:
        yield running


@contextmanager
def running(master: MasterForTest, project: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Run the script, and give the command and the file of all that it prints; the trial is killed at the end."""
    (project / "context").mkdir()
    (project / "context" / "train.py").write_text(TRAIN)
    config = {
        "name": "stalls",
        "entrypoint": "python3 train.py",
        "searcher": SINGLE,
        "max_restarts": 0,
    }
    (project / "exp.yaml").write_text(yaml.safe_dump(config))
    printed = project / "printed"
    with printed.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "dstrial.cli", "run", "exp.yaml", "context", "--no-progress"],
            stdout=out,
            stderr=subprocess.STDOUT,
            text=True,
            env={**master.env, "PYTHONUNBUFFERED": "1"},
            cwd=project,
        )
    try:
        yield process, printed
    finally:
        process.kill()
        process.wait()
        client = master.client()
        for one in client.get("/api/v1/experiments?limit=-1")["experiments"]:
            if one["endTime"] is None:
                client.post(f"/api/v1/experiments/{one['id']}/kill")


def test_a_run_says_that_the_master_is_stopped_and_can_be_left(master: MasterForTest, tmp_path: Path) -> None:
    with running(master, tmp_path) as (process, printed):
        wait_for(lambda: "step 5" in printed.read_text())
        pid = master.record.pid
        os.kill(pid, signal.SIGSTOP)
        try:
            text = f"stalled: the master, process {pid}, is stopped (SIGSTOP)"
            wait_for(lambda: text in printed.read_text(), "it is not told")
            assert f"`kill -CONT {pid}`" in printed.read_text()
            process.send_signal(signal.SIGINT)
            wait_for(lambda: "the master is stopped (SIGSTOP) and will pause" in printed.read_text())
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=20) == 130
        finally:
            os.kill(pid, signal.SIGCONT)


def test_a_run_goes_on_when_the_master_does(master: MasterForTest, tmp_path: Path) -> None:
    with running(master, tmp_path) as (_, printed):
        wait_for(lambda: "step 5" in printed.read_text())
        pid = master.record.pid
        os.kill(pid, signal.SIGSTOP)
        try:
            wait_for(lambda: "stalled: the master" in printed.read_text(), "it is not told")
        finally:
            os.kill(pid, signal.SIGCONT)
        wait_for(lambda: "stalled: no longer, the master goes on" in printed.read_text())


def test_a_run_that_finds_a_stopped_master_says_so_at_once(master: MasterForTest, tmp_path: Path) -> None:
    os.kill(master.record.pid, signal.SIGSTOP)
    try:
        (tmp_path / "train.py").write_text(TRAIN)
        config = {"name": "stalls", "entrypoint": "python3 train.py", "searcher": SINGLE}
        (tmp_path / "exp.yaml").write_text(yaml.safe_dump(config))
        ended = master.dstrial("run", "exp.yaml", ".", cwd=tmp_path, deadline_s=30)
    finally:
        os.kill(master.record.pid, signal.SIGCONT)
    assert ended.returncode == 1
    assert f"process {master.record.pid} is stopped (SIGSTOP); expected" in ended.stderr
