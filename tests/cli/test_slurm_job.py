"""``dstrial run --slurm`` with shell scripts in place of Slurm's commands."""

from __future__ import annotations

import contextlib
import io
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from waiting import wait_for

from dstrial.cli import slurm_job
from dstrial.cli.follow import Verdict
from dstrial.cli.slurm_job import BatchJob
from dstrial.cli.streams import LossTolerantStream
from dstrial.local.run_directory import RunDirectory, RunState
from dstrial.slurm.allocation import Allocation

pytestmark = pytest.mark.process

CONFIG = """
name: small
entrypoint: python3 train.py
searcher: {name: single, metric: loss, max_length: {batches: 1}}
"""
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dstrial_command: Run) -> Run:
    """Return a function that submits a run; its first argument is the fake sbatch."""
    for name in ("SLURM_CLUSTERS", "SBATCH_CLUSTERS", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    commands = tmp_path / "bin"
    commands.mkdir()
    (tmp_path / "train.py").write_text("")
    (tmp_path / "exp.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(commands), prepend=":")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")

    def submit(sbatch: str, *flags: str) -> tuple[int, str, str]:
        sbatch = f'[ "$1" = --test-only ] && exit 0\n{sbatch}'
        for name, body in (
            ("sbatch", sbatch),
            ("squeue", ""),
            ("scontrol", ""),
            ("sinfo", ""),
            ("scancel", ""),
            ("srun", ""),
        ):
            (commands / name).write_text(f"#!/bin/sh\n{body}\n")
            (commands / name).chmod(0o755)
        return dstrial_command("run", "exp.yaml", ".", "--slurm", "--runs-dir", tmp_path / "runs", *flags)

    return submit


def test_rejected_job_leaves_no_directory(run: Run, tmp_path: Path) -> None:
    code, _, errors = run("echo 'sbatch: error: invalid partition specified: nope' >&2; exit 1")
    assert code == 1
    assert "invalid partition specified: nope" in errors
    assert not (tmp_path / "runs").exists()


def test_possibly_queued_job_keeps_its_directory(run: Run, tmp_path: Path) -> None:
    code, _, errors = run("echo 'sbatch: error: Socket timed out on send/recv operation' >&2; exit 1")
    assert code == 1, errors
    assert list(tmp_path.glob("runs/small/*/sbatch.sh"))


_RUNNING_JOB = "JobId=7 JobState={} Reason=None Restarts=0 PreemptTime=2026-11-26T01:23:54 ExitCode=0:0"


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that fakes scontrol: it shows a state and logs other calls."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(slurm_job, "_ENDED_BY_REQUEUE_S", 0.0)
    script = tmp_path / "scontrol"

    def show(state: str) -> None:
        line = _RUNNING_JOB.format(state)
        script.write_text(f'#!/bin/sh\n[ "$1" = show ] && echo \'{line}\' || echo "$@" >> {tmp_path}/told\n')
        script.chmod(0o755)

    return show


def test_preempted_job_stops_and_is_requeued(scontrol: Callable[[str], None], tmp_path: Path) -> None:
    scontrol("RUNNING")
    job = BatchJob(Allocation(7, ("host1",), (1,)), RunDirectory(tmp_path))
    signals: list[signal.Signals] = []
    job.watch(signals)
    wait_for(lambda: signals == [signal.SIGTERM], "the batch script gets no signal itself")
    stopped = Verdict(RunState.STOPPED, 128 + signal.SIGTERM, "SIGTERM")
    verdict = job.decide_requeue(stopped, signal.SIGTERM.name, RunDirectory(tmp_path))
    assert verdict.reason == "Slurm gives its nodes to another job"
    job.requeue(LossTolerantStream(io.StringIO()))
    assert (tmp_path / "told").read_text() == "requeue 7\n"


def test_follower_with_two_signals_cancels_job_before_detaching(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(
        slurm_job, "noted_signals", lambda: contextlib.nullcontext([signal.SIGINT, signal.SIGTERM])
    )
    monkeypatch.setattr(slurm_job.client, "cancel", lambda _job_id: asked.append("cancel"))
    out = io.StringIO()
    follower = slurm_job._Follower(7, tmp_path / "log", LossTolerantStream(out))
    assert follower.follow() == 128 + signal.SIGTERM
    assert asked == ["cancel"]
    assert [line.partition(" ")[0] for line in out.getvalue().splitlines()] == ["SIGINT:", "job"]
