"""``dstrial run --slurm``: its flags, and the job of Slurm's in which it trains."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import signal
import threading
import time
from collections.abc import Mapping

from dstrial.cli.run_outcome import Verdict
from dstrial.cli.streams import LossTolerantStream
from dstrial.errors import ConfigError, ConfigProblem, LaunchError
from dstrial.hosts.hostfile import require_hostfile
from dstrial.local.checkpoint_directory import newest_checkpoint
from dstrial.local.json_files import write_json_atomically
from dstrial.local.run_directory import RunDirectory, RunState
from dstrial.slurm import client
from dstrial.slurm.allocation import Allocation, allocation_of
from dstrial.slurm.jobs import Job

_POLL_S = 3.0  # between questions to Slurm's controller; a grace period is rarely below 30 s
_ENDED_BY_REQUEUE_S = 90.0
_PREEMPTED = "Slurm gives its nodes to another job"


def add_slurm_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "Slurm",
        "Submit the run as a batch job and follow it; in an allocation (salloc, sbatch) train on its nodes.",
    )
    group.add_argument("--slurm", action="store_true", help="train under Slurm, a task for each slot")
    group.add_argument(
        "--sbatch-arg",
        action="append",
        default=[],
        metavar="ARG",
        help="one more option of sbatch, --sbatch-arg=--partition=gpu for example; repeatable, behind slurm.sbatch_args",
    )
    group.add_argument("--print-sbatch", action="store_true", help="show the batch script and submit nothing")
    group.add_argument("--detach", action="store_true", help="submit the job and do not follow it")


def require_slurm_flags(args: argparse.Namespace) -> None:
    """Refuse flags that do not go together."""
    problems = []
    if not args.slurm:
        require_hostfile(args)
    for flag, value in (
        ("--sbatch-arg", args.sbatch_arg),
        ("--print-sbatch", args.print_sbatch),
        ("--detach", args.detach),
    ):
        if value and not args.slurm:
            problems.append(ConfigProblem(flag, "given without --slurm", "both or none", "Add --slurm."))
    if args.slurm and args.hostfile is not None:
        problems.append(
            ConfigProblem(
                "--hostfile",
                "given with --slurm",
                "one of the two",
                "Leave --hostfile out: Slurm names the nodes.",
            )
        )
    for flag, value in (("--include", args.include), ("--exclude", args.exclude)):
        if args.slurm and value:
            fix = "Use --sbatch-arg=--nodelist=NODES or --sbatch-arg=--exclude=NODES."
            problems.append(ConfigProblem(flag, "given with --slurm", "options of sbatch", fix))
    if problems:
        raise ConfigError(problems)


def unused_nodes_hint(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return a hint for a user who trains on one node of a job of several."""
    with contextlib.suppress(LaunchError):
        allocation = allocation_of(environ)
        if allocation is not None and len(allocation.nodes) > 1:
            return (
                f"job {allocation.job_id} has {len(allocation.nodes)} nodes, and this trains on one of them alone; "
                "--slurm trains on all"
            )
    return None


class BatchJob:
    """The job in which this command trains a run.

    Slurm may end the job early; then the run is stopped with a checkpoint, and the job requeued.
    """

    def __init__(self, allocation: Allocation, run_directory: RunDirectory) -> None:
        self._job_id = allocation.job_id
        self._newest = _newest_uuid(run_directory)
        self._requeue_reason = ""
        write_json_atomically(run_directory.slurm_job_path, {"job_id": self._job_id})

    def watch(self, signals: list[signal.Signals]) -> None:
        """Add SIGTERM to ``signals`` when Slurm ends the job; any signal ends the watch.

        A preempted job's steps get that signal, its batch script does not.
        """

        def poll() -> None:
            while not signals:
                job = self._job()
                if job is not None and (job.is_preempted or job.state != "RUNNING"):
                    signals.append(signal.SIGTERM)
                time.sleep(_POLL_S)

        threading.Thread(target=poll, name="dstrial-slurm-job", daemon=True).start()

    def judged(self, verdict: Verdict, stopped_by: str | None, run_directory: RunDirectory) -> Verdict:
        """Decide whether to requeue the job, and return the verdict with its reason."""
        if verdict.state is RunState.COMPLETED:
            return verdict
        if stopped_by == signal.SIGUSR1.name:
            if _newest_uuid(run_directory) == self._newest:
                if verdict.state is not RunState.STOPPED:
                    return verdict
                reason = "the job's time is over, and it has stored no checkpoint: ask for more time (--sbatch-arg=--time=...)"
                return Verdict(RunState.FAILED, 1, reason)
            self._requeue_reason = "its time is over"
        else:
            job = self._job()
            if job is None or not job.is_preempted:
                return verdict
            self._requeue_reason = _PREEMPTED
        return dataclasses.replace(verdict, reason=self._requeue_reason)

    @property
    def will_requeue(self) -> bool:
        return bool(self._requeue_reason)

    def requeue(self, out: LossTolerantStream) -> None:
        """Requeue the job if ``judged`` has decided so, which ends this process."""
        if not self._requeue_reason:
            return
        job = self._job() if self._requeue_reason == _PREEMPTED else None
        if job is not None and job.state != "RUNNING":
            # Even one that its user has cancelled would go back into the queue (Slurm 22.05).
            out.write(
                f"job {self._job_id} is left as it is ({job.described}): it was cancelled meanwhile, or Slurm ends it itself\n"
            )
            return
        out.write(f"job {self._job_id} is queued again, because {self._requeue_reason}\n")
        refusal = client.requeue(self._job_id)
        if refusal:
            out.write(f"job {self._job_id} cannot be queued again ({refusal}); go on with it by --resume\n")
            return
        time.sleep(_ENDED_BY_REQUEUE_S)

    def _job(self) -> Job | None:
        with contextlib.suppress(ConnectionError):
            return client.job_of(self._job_id)
        return None


def _newest_uuid(run_directory: RunDirectory) -> str | None:
    newest = newest_checkpoint(run_directory.checkpoints_path)
    return None if newest is None else newest.uuid
