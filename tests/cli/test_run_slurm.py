"""Whether a job goes back into the queue when its run has been stopped; scontrol is a script of ours."""

from __future__ import annotations

import io
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from waiting import wait_for

from dstrial.cli import run_slurm
from dstrial.cli.run_outcome import Verdict
from dstrial.cli.run_slurm import BatchJob
from dstrial.cli.streams import LossTolerantStream
from dstrial.local.run_directory import RunDirectory, RunState
from dstrial.slurm.allocation import Allocation

pytestmark = pytest.mark.process
_JOB = "JobId=7 JobState={} Reason=None Restarts=0 PreemptTime=2026-11-26T01:23:54 ExitCode=0:0"


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return what has scontrol show the job in a state, and note what else it is told."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(run_slurm, "_ENDED_BY_REQUEUE_S", 0.0)
    script = tmp_path / "scontrol"

    def show(state: str) -> None:
        line = _JOB.format(state)
        script.write_text(f'#!/bin/sh\n[ "$1" = show ] && echo \'{line}\' || echo "$@" >> {tmp_path}/told\n')
        script.chmod(0o755)

    return show


@pytest.mark.parametrize(("state", "told"), [("RUNNING", "requeue 7\n"), ("COMPLETING", None)])
def test_a_preempted_job_goes_back_unless_it_is_being_ended_meanwhile(
    scontrol: Callable[[str], None], tmp_path: Path, state: str, told: str | None
) -> None:
    scontrol("RUNNING")
    job = BatchJob(Allocation(7, ("host1",), (1,)), RunDirectory(tmp_path))
    signals: list[signal.Signals] = []
    job.watch(signals)
    wait_for(lambda: signals == [signal.SIGTERM], "the batch script gets no signal itself")
    stopped = Verdict(RunState.STOPPED, 128 + signal.SIGTERM, "SIGTERM")
    verdict = job.judged(stopped, signal.SIGTERM.name, RunDirectory(tmp_path))
    assert verdict.reason == "Slurm gives its nodes to another job"
    scontrol(state)
    printed = io.StringIO()
    job.requeue(LossTolerantStream(printed))
    path = tmp_path / "told"
    assert (path.read_text() if path.exists() else None) == told
    if told is None:
        assert (
            printed.getvalue()
            == "job 7 is left as it is (completing): it was cancelled meanwhile, or Slurm ends it itself\n"
        )
