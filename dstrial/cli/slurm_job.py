"""``dstrial run --slurm``: submit a job and follow it, or train inside a job."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from dstrial.cli.follow import Verdict
from dstrial.cli.streams import LossTolerantStream
from dstrial.config.experiment_config.config import ExperimentConfig
from dstrial.errors import ConfigError, ConfigProblem, LaunchError
from dstrial.hosts.hostfile import require_hostfile
from dstrial.local.checkpoint_directory import newest_checkpoint
from dstrial.local.json_files import write_json_atomically
from dstrial.local.run_directory import (
    RunDirectory,
    RunState,
    default_runs_dir,
    experiment_slug,
    new_run_path,
    shown_path,
)
from dstrial.ranks.stop_signals import noted_signals
from dstrial.slurm import client
from dstrial.slurm.allocation import Allocation, allocation_of
from dstrial.slurm.jobs import Job
from dstrial.slurm.script import (
    LOG_NAME,
    SCRIPT_NAME,
    asks_for_devices,
    batch_script,
    request_lines,
    sbatch_args,
    value_of,
)
from dstrial.visible_text import visible

_POLL_S = 3.0  # between queries of Slurm's controller; a grace period is rarely below 30 s
_SHOW_S = 0.5  # between reads of the job's output
_ENDED_BY_REQUEUE_S = 90.0  # wait after a requeue, in which Slurm ends this process


def add_slurm_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "Slurm",
        "Submit the run as a batch job and follow it. Inside an allocation (salloc, sbatch), train on the allocation's nodes.",
    )
    group.add_argument("--slurm", action="store_true", help="train under Slurm, with one Slurm task per slot")
    group.add_argument(
        "--sbatch-arg",
        action="append",
        default=[],
        metavar="ARG",
        help="further option of sbatch, such as --sbatch-arg=--partition=gpu; repeatable; follows slurm.sbatch_args of EXP.yaml",
    )
    group.add_argument("--print-sbatch", action="store_true", help="show the batch script and submit nothing")
    group.add_argument("--detach", action="store_true", help="submit the job and do not follow it")


def require_slurm_flags(args: argparse.Namespace) -> None:
    """Raise ``ConfigError`` for flags that are invalid with or without ``--slurm``.

    ``--hostfile``, ``--include`` and ``--exclude`` are invalid with ``--slurm``. ``--sbatch-arg``, ``--print-sbatch`` and
    ``--detach`` are invalid without ``--slurm``. Without ``--slurm``, flags that need ``--hostfile`` are also checked.
    """
    if args.slurm:
        nodes_fix = "Use --sbatch-arg=--nodelist=NODES or --sbatch-arg=--exclude=NODES."
        rules = [
            ("--hostfile", args.hostfile, "one of the two", "Leave --hostfile out: Slurm names the nodes."),
            ("--include", args.include, "options of sbatch", nodes_fix),
            ("--exclude", args.exclude, "options of sbatch", nodes_fix),
        ]
    else:
        require_hostfile(args)
        rules = [
            (flag, value, "both or none", "Add --slurm.")
            for flag, value in (
                ("--sbatch-arg", args.sbatch_arg),
                ("--print-sbatch", args.print_sbatch),
                ("--detach", args.detach),
            )
        ]
    got = "given with --slurm" if args.slurm else "given without --slurm"
    problems = [ConfigProblem(flag, got, expected, fix) for flag, value, expected, fix in rules if value]
    if problems:
        raise ConfigError(problems)


def unused_nodes_hint() -> str | None:
    """Return a hint if training uses only one of a Slurm job's nodes, else None."""
    with contextlib.suppress(LaunchError):
        allocation = allocation_of(os.environ)
        if allocation is not None and len(allocation.nodes) > 1:
            return (
                f"job {allocation.job_id} has {len(allocation.nodes)} nodes, but this run trains on only one of them; "
                "--slurm trains on all nodes"
            )
    return None


class BatchJob:
    """The Slurm job inside which ``dstrial run`` trains.

    If Slurm ends the job early, the run is stopped with a checkpoint and the job is requeued.
    """

    def __init__(self, allocation: Allocation, run_directory: RunDirectory) -> None:
        self._job_id = allocation.job_id
        self._newest = newest_checkpoint(run_directory.checkpoints_path)
        self._requeue_reason = ""
        write_json_atomically(run_directory.slurm_job_path, {"job_id": self._job_id})

    def watch(self, signals: list[signal.Signals]) -> None:
        """Start a thread that appends SIGTERM to ``signals`` when Slurm ends the job.

        The thread is needed because Slurm signals the steps of a preempted job, but not its batch script. The thread ends as
        soon as ``signals`` has an item.
        """

        def poll() -> None:
            while not signals:
                job = self._job()
                if job is not None and (job.is_preempted or job.state != "RUNNING"):
                    signals.append(signal.SIGTERM)
                time.sleep(_POLL_S)

        threading.Thread(target=poll, name="dstrial-slurm-job", daemon=True).start()

    def decide_requeue(
        self, verdict: Verdict, stopped_by: str | None, run_directory: RunDirectory
    ) -> Verdict:
        """Decide whether to requeue the job; if so, return ``verdict`` with the reason.

        If not, ``verdict`` is returned unchanged, with one exception. If the job's time limit stopped the run and the job has
        saved no new checkpoint, the verdict is FAILED. ``stopped_by`` is the name of the signal that stopped the run.
        """
        if verdict.state is RunState.COMPLETED:
            return verdict
        if stopped_by == signal.SIGUSR1.name:
            newest = newest_checkpoint(run_directory.checkpoints_path)
            if newest is None or (self._newest is not None and newest.uuid == self._newest.uuid):
                if verdict.state is not RunState.STOPPED:
                    return verdict
                reason = "the job's time is over, and it has saved no checkpoint: ask for more time (--sbatch-arg=--time=...)"
                return Verdict(RunState.FAILED, 1, reason)
            self._requeue_reason = "its time is over"
        else:
            job = self._job()
            if job is None or not job.is_preempted:
                return verdict
            self._requeue_reason = "Slurm gives its nodes to another job"
        return dataclasses.replace(verdict, reason=self._requeue_reason)

    @property
    def will_requeue(self) -> bool:
        return bool(self._requeue_reason)

    def requeue(self, out: LossTolerantStream) -> None:
        """Requeue the job; no-op unless ``decide_requeue`` decided to requeue.

        Slurm ends this process after it has accepted the request.
        """
        if not self._requeue_reason:
            return
        out.write(f"job {self._job_id} is queued again, because {self._requeue_reason}\n")
        if refusal := client.requeue(self._job_id):
            out.write(
                f"job {self._job_id} cannot be queued again ({refusal}); continue the run with --resume\n"
            )
        else:
            time.sleep(_ENDED_BY_REQUEUE_S)

    def _job(self) -> Job | None:
        with contextlib.suppress(ConnectionError):
            return client.job_of(self._job_id)
        return None


def run_as_job(
    args: argparse.Namespace, experiment: ExperimentConfig, inner: Sequence[str], own: Path | None
) -> int:
    """Submit a run as a batch job and follow it; return the exit status.

    ``inner`` are the arguments of the job's ``dstrial run``, without ``--run-dir``. ``own`` is the directory of the run; None
    chooses a new directory. With ``--print-sbatch`` the script is only printed; with ``--detach`` the job is not followed.
    """
    out = LossTolerantStream(sys.stdout)
    path = own or new_run_path(default_runs_dir(args.runs_dir), experiment.name)
    text = _script(args, experiment, inner, path)
    if args.print_sbatch:
        out.write(text)
        return 0
    is_new = not path.exists()
    log, script = path / LOG_NAME, path / SCRIPT_NAME
    try:
        path.mkdir(parents=True, exist_ok=True)
        script.write_text(text, encoding="utf-8")
    except OSError as error:
        raise LaunchError(
            f"the run directory is {path}, which cannot be made ({error.strerror}); expected one on a file system that all nodes "
            "mount. Name another place with --runs-dir or DSTRIAL_RUNS_DIR."
        ) from error
    try:
        job_id = client.submit(script)
    except LaunchError as error:
        if is_new and not client.is_away(str(error)):  # else the job may be queued all the same
            shutil.rmtree(path, ignore_errors=True)
            for parent in path.parents[:2] if own is None else ():
                with contextlib.suppress(OSError):  # another run is there
                    parent.rmdir()
        raise
    write_json_atomically(RunDirectory(path).slurm_job_path, {"job_id": job_id})
    out.write(f"job {job_id}: queued; its output is written to {shown_path(log)}\n")
    if args.detach:
        out.write(f"`scancel {job_id}` ends it with a checkpoint, `squeue -j {job_id}` shows its state\n")
        return 0
    return _Follower(job_id, log, out).follow()


def _script(args: argparse.Namespace, experiment: ExperimentConfig, inner: Sequence[str], path: Path) -> str:
    where = str(experiment.path)
    settings = experiment.raw.get("slurm") or {}
    options = sbatch_args(settings, args.sbatch_arg, where)
    if not args.print_sbatch:
        client.require_slurm("sbatch", "scontrol", "scancel", "srun")
    environ = {**os.environ, **experiment.environment_variables}
    wants_devices = environ.get("DS_ACCELERATOR") != "cpu" and not asks_for_devices(options)
    if wants_devices and not settings.get("gpu_type"):
        partition = value_of(options, "--partition", "-p") or os.environ.get("SBATCH_PARTITION")
        wants_devices = shutil.which("sinfo") is not None and client.has_devices(partition)
    num_slots = max(args.slots or experiment.slots_per_trial, 1)
    return batch_script(
        name=experiment_slug(experiment.name),
        request=request_lines(settings, options, num_slots, wants_devices=wants_devices, where=where),
        options=options,
        run_directory=path,
        working_directory=Path.cwd(),
        command=[args.python or sys.executable, "-u", "-m", "dstrial", *inner, "--run-dir", str(path)],
        submitted_by=shlex.join(["dstrial", *inner]),
    )


class _Follower:
    """Shows a job's output; Ctrl-C stops the job, a second Ctrl-C only this command."""

    def __init__(self, job_id: int, log: Path, out: LossTolerantStream) -> None:
        self._job_id, self._log, self._out = job_id, log, out
        self._offset = log.stat().st_size if log.exists() else 0
        self._described = ""
        self._is_stopping = False
        self._last: Job | None = None

    def follow(self) -> int:
        poll_at_s = 0.0
        with noted_signals() as signals:
            while True:
                if signals and not self._is_stopping:
                    self._stop(signals[0])
                    poll_at_s = 0.0
                if len(signals) > 1:
                    self._say(
                        f"job {self._job_id} continues without this command; `scancel {self._job_id}` ends it"
                    )
                    return 128 + signals[-1]
                if time.monotonic() >= poll_at_s:
                    poll_at_s = time.monotonic() + _POLL_S
                    with contextlib.suppress(ConnectionError):  # asked again
                        job = client.job_of(self._job_id)
                        self._last = job or self._last
                        if job is None or job.is_over:
                            self._show_output()
                            return self._end()
                        self._show_state(job)
                self._show_output()
                time.sleep(_SHOW_S)

    def _stop(self, stop: signal.Signals) -> None:
        self._is_stopping = True
        if self._last is not None and not self._last.is_waiting:
            refusal = client.cancel(self._job_id, signal_name="TERM")
            what = "stopping all ranks at the same batch, saving a checkpoint"
        else:
            refusal = client.cancel(self._job_id)
            what = "taking the job out of the queue"
        self._say(
            f"{stop.name}: {what} (a second Ctrl-C ends only this command)"
            + (f"; {refusal}" if refusal else "")
        )

    def _show_state(self, job: Job) -> None:
        if job.described == self._described:
            return
        self._described = job.described
        again = f", started again {job.num_restarts} time(s)" if job.num_restarts else ""
        when = f", expected {job.begins_at.replace('T', ' ')}" if job.is_waiting and job.begins_at else ""
        self._say(f"job {self._job_id}: {job.described}{again}{when}")

    def _say(self, text: str) -> None:
        self._out.write(visible(f"{text}\n"))

    def _show_output(self) -> None:
        with contextlib.suppress(OSError), self._log.open("rb") as file:
            file.seek(self._offset)
            data = file.read(1 << 22)
            whole = data[: data.rfind(b"\n") + 1]
            self._offset += len(whole)
            if whole:
                self._out.write(visible(whole.decode(errors="replace")))

    def _end(self) -> int:
        job = self._last
        if job is None:
            self._say(f"Slurm no longer knows job {self._job_id}; its output is in {self._log}")
            return 1
        how = "stopped, as asked" if job.state == "FAILED" and self._is_stopping else job.described
        if job.state != "COMPLETED":
            seen = f"in {self._log}" if self._log.exists() else f"not in {self._log}: does the node see it?"
            self._say(f"job {self._job_id}: {how}; its output is {seen}")
        if job.state == "CANCELLED":
            return 128 + signal.SIGTERM
        return 0 if job.state == "COMPLETED" else job.exit_code or (128 + job.signal if job.signal else 1)
