"""Where a run over hosts trains: on hosts of the user's, or in a job of Slurm's."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import time
from collections.abc import Iterator
from types import FrameType

from dstrial.cli.run_outcome import Verdict
from dstrial.cli.streams import LossTolerantStream
from dstrial.hosts.srun import transport_of
from dstrial.hosts.transport import Transport
from dstrial.local.checkpoint_directory import newest_checkpoint
from dstrial.local.json_files import write_json_atomically
from dstrial.local.run_directory import RunDirectory, RunState
from dstrial.slurm import client
from dstrial.slurm.allocation import Allocation
from dstrial.slurm.job import Job

_ENDED_BY_REQUEUE_S = 90.0
_PREEMPTED = "Slurm gives its nodes to another job"


class RunSite:
    """Hosts of the user's own, which nobody takes away; ``transport`` is None for ssh."""

    transport: Transport | None = None
    stop_signals: tuple[signal.Signals, ...] = ()

    def watched(self) -> contextlib.AbstractContextManager[None]:
        """Watch for an early end within the block."""
        return contextlib.nullcontext()

    @property
    def is_ending(self) -> bool:
        """Whether nothing more may start there."""
        return False

    def begin(self, run_directory: RunDirectory) -> None:
        """Hear that a run begins there."""

    def judged(
        self,
        verdict: Verdict,
        stopped_by: str | None,  # noqa: ARG002  # a job's site asks
        run_directory: RunDirectory,  # noqa: ARG002
    ) -> Verdict:
        """Return the verdict as seen from the site; ``stopped_by`` names a signal."""
        return verdict

    @property
    def is_started_again(self) -> bool:
        """Whether Slurm will requeue the run."""
        return False

    def leave(self, out: LossTolerantStream) -> None:
        """Requeue the job, if so decided, when everything is recorded."""


class BatchJob(RunSite):
    """The job that this command trains in, which Slurm may end, and start again."""

    stop_signals = (signal.SIGUSR1,)

    def __init__(self, allocation: Allocation) -> None:
        self._job_id = allocation.job_id
        self.transport = transport_of(allocation)
        self._is_out_of_time = False
        self._newest: str | None = None
        self._again = ""

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Note within the block that the job's time is running out (``--signal=B:USR1``)."""

        def on_signal(_number: int, _frame: FrameType | None) -> None:
            self._is_out_of_time = True

        previous = signal.signal(signal.SIGUSR1, on_signal)
        try:
            yield
        finally:
            signal.signal(signal.SIGUSR1, previous)

    @property
    def is_ending(self) -> bool:
        if self._is_out_of_time:
            return True
        job = self._seen()
        return job is not None and (job.is_preempted or job.state != "RUNNING")

    def begin(self, run_directory: RunDirectory) -> None:
        """Record which job trains the run."""
        self._newest = _newest_uuid(run_directory)
        write_json_atomically(run_directory.slurm_job_path, {"job_id": self._job_id})

    def judged(self, verdict: Verdict, stopped_by: str | None, run_directory: RunDirectory) -> Verdict:
        """Decide whether Slurm is to requeue the job, and say why its ranks stopped."""
        if verdict.state is RunState.COMPLETED:
            return verdict
        if self._is_out_of_time or stopped_by == signal.SIGUSR1.name:
            if _newest_uuid(run_directory) == self._newest:
                if verdict.state is not RunState.STOPPED:
                    return verdict
                reason = "the job's time is over, and it has stored no checkpoint: ask for more time (--sbatch-arg=--time=...)"
                return Verdict(RunState.FAILED, 1, reason)
            self._again = "its time is over"
        else:
            job = self._seen()
            if job is None or not job.is_preempted:
                return verdict
            self._again = _PREEMPTED
        return dataclasses.replace(verdict, reason=self._again)

    @property
    def is_started_again(self) -> bool:
        return bool(self._again)

    def leave(self, out: LossTolerantStream) -> None:
        """Requeue the job where that is due, which ends this process."""
        if not self._again:
            return
        job = self._seen() if self._again == _PREEMPTED else None
        if job is not None and job.state != "RUNNING":
            # Even one that its user has cancelled would go back into the queue (Slurm 22.05).
            out.write(
                f"job {self._job_id} is left as it is ({job.described}): it was cancelled meanwhile, or Slurm ends it itself\n"
            )
            return
        out.write(f"job {self._job_id} is queued again, because {self._again}\n")
        refusal = client.requeue(self._job_id)
        if refusal:
            out.write(f"job {self._job_id} cannot be queued again ({refusal}); go on with it by --resume\n")
            return
        time.sleep(_ENDED_BY_REQUEUE_S)

    def _seen(self) -> Job | None:
        with contextlib.suppress(ConnectionError):
            return client.job_of(self._job_id)
        return None


def _newest_uuid(run_directory: RunDirectory) -> str | None:
    newest = newest_checkpoint(run_directory.checkpoints_path)
    return None if newest is None else newest.uuid
