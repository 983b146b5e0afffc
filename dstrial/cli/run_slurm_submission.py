"""``dstrial run --slurm`` outside of an allocation: submit a job and follow it.

The run is submitted as a batch job.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from dstrial.cli.streams import LossTolerantStream
from dstrial.config import ExperimentConfig
from dstrial.errors import ConfigError, ConfigProblem, LaunchError
from dstrial.local.json_files import write_json_atomically
from dstrial.local.run_directory import (
    RunDirectory,
    default_runs_dir,
    experiment_slug,
    new_run_path,
    shown_path,
)
from dstrial.ranks.stop_signals import noted_signals
from dstrial.slurm import client
from dstrial.slurm.jobs import Job, explained, is_for_ever
from dstrial.slurm.script import (
    LOG_NAME,
    OF_CLUSTERS,
    SCRIPT_NAME,
    asks_for_devices,
    batch_script,
    request_lines,
    sbatch_args,
    value_of,
)
from dstrial.visible_text import visible

_LOOK_S = 0.5
_ASK_S = (1.0, 15.0)
_AWAY_S = 60.0


@dataclasses.dataclass(frozen=True, slots=True)
class Submission:
    """A run to be submitted.

    Attributes:
        script: text of the batch script.
        run_directory: absolute.
        has_own_output: whether the user has chosen the job's output file.
    """

    script: str
    run_directory: Path
    has_own_output: bool


def prepare(
    args: argparse.Namespace, experiment: ExperimentConfig, inner: Sequence[str], own: Path | None
) -> Submission:
    """Write the batch script of a run.

    ``inner`` are arguments of the job's command, without ``--run-dir``; ``own`` is the run's directory, if it has one already.
    """
    where = str(experiment.path)
    settings = experiment.raw.get("slurm") or {}
    options = sbatch_args(settings, args.sbatch_arg, where)
    cluster = value_of(options, *OF_CLUSTERS)
    if cluster is not None:
        problem = ConfigProblem(
            f"{where}: slurm.sbatch_args, or --sbatch-arg",
            f"--clusters={cluster}",
            "a job of this machine's cluster, where squeue and scancel look for it",
            "Leave it out, or submit the run on a machine of that cluster.",
        )
        raise ConfigError([problem])
    if not args.print_sbatch:
        client.require_slurm("sbatch", "scontrol", "scancel", "srun")
    environ = {**os.environ, **experiment.environment_variables}
    wants_devices = environ.get("DS_ACCELERATOR") != "cpu" and not asks_for_devices(options)
    if wants_devices and not settings.get("gpu_type"):
        partition = value_of(options, "--partition", "-p") or os.environ.get("SBATCH_PARTITION")
        wants_devices = shutil.which("sinfo") is not None and client.has_devices(partition)
    num_slots = max(args.slots or experiment.slots_per_trial, 1)
    request = request_lines(settings, options, num_slots, wants_devices=wants_devices, where=where)
    path = own or new_run_path(default_runs_dir(args.runs_dir), experiment.name)
    python = args.python or sys.executable
    words = ["dstrial", *inner]
    script = batch_script(
        name=experiment_slug(experiment.name),
        request=request,
        options=options,
        run_directory=path,
        working_directory=Path.cwd(),
        command=[python, "-u", "-m", "dstrial", *inner, "--run-dir", str(path)],
        submitted_by=shlex.join(words),
    )
    return Submission(script, path, value_of(options, "--output", "-o") is not None)


def submit_and_follow(args: argparse.Namespace, submission: Submission) -> int:
    """Queue the job, and show its output until it has ended; return the exit status."""
    out = LossTolerantStream(sys.stdout)
    if args.print_sbatch:
        out.write(submission.script)
        return 0
    job_id, log = _submitted(submission, lambda text: out.write(visible(f"{text}\n")))
    out.write(f"job {job_id}: queued; it prints into {shown_path(log)}\n")
    if args.detach:
        out.write(f"`scancel {job_id}` ends it with a checkpoint, `squeue -j {job_id}` says how it is\n")
        return 0
    return _Follower(job_id, log, out, python=args.python or sys.executable).follow()


def _submitted(submission: Submission, tell: Callable[[str], object]) -> tuple[int, Path]:
    path = submission.run_directory
    made = [path, *(above for above in path.parents)]
    made = made[: next(number for number, one in enumerate(made) if one.exists())]
    try:
        path.mkdir(parents=True, exist_ok=True)
        script = path / SCRIPT_NAME
        script.write_text(submission.script, encoding="utf-8")
    except OSError as error:
        raise LaunchError(
            f"the run directory is {path}, which cannot be made ({error.strerror}); expected one on a file system that all nodes "
            "mount. Name another place with --runs-dir or DSTRIAL_RUNS_DIR."
        ) from error
    try:
        job_id = client.submit(script)
    except LaunchError as error:
        if not client.is_away(str(error)):
            _remove(made)
            raise
        raise LaunchError(f"{error} {_unknown_text(path)}") from error
    except BaseException:  # Ctrl-C, most likely
        tell(_unknown_text(path))
        raise
    write_json_atomically(RunDirectory(path).slurm_job_path, {"job_id": job_id})
    job: Job | None = None
    is_hopeless = False
    with contextlib.suppress(ConnectionError):  # it is queued, whether or not Slurm can say more now
        job = client.job_of(job_id)
        if _waits_for_ever(job) and not client.has_unknown_nodes():
            job = client.job_of(job_id)  # The last of the nodes may have registered after the first answer.
            is_hopeless = _waits_for_ever(job)
    if job is not None and is_hopeless:
        client.cancel(job_id)
        _remove(made)
        raise LaunchError(
            f"Slurm has taken job {job_id} and would never start it: {explained(job.reason)}; expected one that its "
            "partition and QOS let run. Ask for less, or name others (--sbatch-arg=--partition=NAME, --sbatch-arg=--qos=NAME). "
            "The job is cancelled."
        )
    if submission.has_own_output and job is not None and job.output:
        return job_id, Path(job.output.replace("%%", "%"))
    return job_id, path / LOG_NAME


def _waits_for_ever(job: Job | None) -> bool:
    return job is not None and job.is_waiting and is_for_ever(job.reason)


def _unknown_text(path: Path) -> str:
    """Return what to do where Slurm may have queued a job without confirming it."""
    return f"A job may be queued all the same, and keeps {path}; `squeue --me` shows it, `scancel` ends it."


def _remove(made: Sequence[Path]) -> None:
    """Delete a run's directory, and the parents that were made for it."""
    for number, path in enumerate(made):
        if number == 0:
            shutil.rmtree(path, ignore_errors=True)
            continue
        with contextlib.suppress(OSError):  # another run has begun there
            path.rmdir()


class _Follower:
    """Shows a job's output. Ctrl-C ends it with a checkpoint, a second one detaches."""

    def __init__(self, job_id: int, log: Path, out: LossTolerantStream, *, python: str) -> None:
        self._job_id, self._log, self._out, self._python = job_id, log, out, python
        self._at = log.stat().st_size if log.exists() else 0
        self._has_printed = False
        self._told = ""
        self._is_due = False
        self._is_stopping = False
        self._last: Job | None = None

    def follow(self) -> int:
        ask_s, asked_at_s, heard_s = _ASK_S[0], -1e9, time.monotonic()
        num_passed_on = 0
        with noted_signals() as signals:
            while True:
                if len(signals) > num_passed_on:
                    num_passed_on += 1
                    if num_passed_on > 1:
                        self._say(f"job {self._job_id} goes on by itself; `scancel {self._job_id}` ends it")
                        return 128 + signals[-1]
                    self._stop(signals[0])
                    asked_at_s, ask_s = -1e9, _ASK_S[0]
                now_s = time.monotonic()
                if self._is_due or now_s >= asked_at_s + ask_s:
                    asked_at_s, self._is_due = now_s, False
                    try:
                        job = client.job_of(self._job_id)
                    except ConnectionError as error:
                        if now_s > heard_s + _AWAY_S:
                            heard_s = now_s
                            self._say(
                                f"Slurm's controller has not answered for {_AWAY_S:g} s ({error}); the job goes on"
                            )
                    else:
                        heard_s = now_s
                        is_new = self._tell(job)
                        ask_s = _ASK_S[0] if is_new else min(ask_s * 1.5, _ASK_S[1])
                        if job is None or job.is_over:
                            self._show()
                            return self._end(job)
                self._show()
                time.sleep(_LOOK_S)

    def _stop(self, stop: signal.Signals) -> None:
        self._is_stopping = True
        if self._last is not None and not self._last.is_waiting:
            refusal = client.cancel(self._job_id, signal_name="TERM")
            what = "stopping all ranks at the same batch, saving a checkpoint"
        else:
            refusal = client.cancel(self._job_id)
            what = "taking the job out of the queue"
        self._say(
            f"{stop.name}: {what} (Ctrl-C again leaves the job alone)" + (f"; {refusal}" if refusal else "")
        )

    def _tell(self, job: Job | None) -> bool:
        """Print a new state of the job; return whether it is new."""
        self._last = job or self._last
        if job is None:
            return False
        text = job.described
        if job.state == "FAILED" and self._is_stopping:
            text = "stopped, as asked"
        if text == self._told:
            return False
        self._told = text
        again = f", started again {job.num_restarts} time(s)" if job.num_restarts else ""
        when = f", expected {job.begins_at.replace('T', ' ')}" if job.is_waiting and job.begins_at else ""
        self._say(f"job {self._job_id}: {text}{again}{when}")
        return True

    def _say(self, text: str) -> None:
        self._out.write(visible(f"{text}\n"))

    def _show(self) -> None:
        with contextlib.suppress(OSError), self._log.open("rb") as file:
            file.seek(self._at)
            data = file.read(1 << 22)
            whole = data[: data.rfind(b"\n") + 1]
            if whole:
                self._at += len(whole)
                if self._last is not None and self._last.is_waiting:
                    self._is_due = True  # it has begun
                self._has_printed = True
                self._out.write(visible(whole.decode(errors="replace")))

    def _end(self, job: Job | None) -> int:
        job = job or self._last
        if job is None:
            self._say(f"Slurm knows nothing of job {self._job_id} any more; {self._log} says what it did")
            return 1
        if job.state == "COMPLETED":
            return 0
        if job.state == "CANCELLED":
            return 128 + signal.SIGTERM
        if not self._has_printed and not self._log.exists():
            self._say(
                f"job {self._job_id} has {job.described}, and {self._log.parent} has nothing of it: most likely "
                f"{job.nodes or 'its node'} does not see this directory. Put it on a file system that all nodes mount, and "
                "name it by --runs-dir or DSTRIAL_RUNS_DIR."
            )
        elif job.exit_code in (126, 127):
            self._say(
                f"job {self._job_id} could not be started: {job.nodes or 'its node'} has no Python at {self._python}. Put the "
                "environment on a file system that all nodes mount, or name another interpreter by --python."
            )
        elif job.state not in ("FAILED",):
            self._say(f"job {self._job_id} has ended: {job.described}")
        return job.exit_code or (128 + job.signal if job.signal else 1)
