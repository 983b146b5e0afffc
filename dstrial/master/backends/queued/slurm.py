"""Slurm as an engine: a batch job for each trial, which only holds its nodes."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dstrial.config.diagnostics import render
from dstrial.errors import ConfigError, LaunchError, NodesDownError
from dstrial.hosts.srun import SrunTransport
from dstrial.hosts.transport import Transport
from dstrial.master.backends.backend import Refusal
from dstrial.master.backends.engine import (
    EngineJob,
    EngineNotNowError,
    EngineRefusedError,
    JobRequest,
    JobState,
    Part,
)
from dstrial.master.backends.queued.plan import MOST_PENDING
from dstrial.master.store.nodes import MOST_SLOTS
from dstrial.slurm import client
from dstrial.slurm.nodelist import expand_counts, expand_nodes
from dstrial.slurm.script import (
    ALIVE_NAME,
    GIVEN_BACK_SUFFIX,
    NODES_SUFFIX,
    asks_for_devices,
    holding_script,
    request_lines,
    sbatch_args,
    value_of,
)
from dstrial.slurm.squeue import (
    SINFO,
    SPARE,
    SQUEUE,
    WAITING,
    QueuedJob,
    others_wait,
    parse_nodes,
    parse_queue,
    parse_spare,
    refused_options,
)

COMMANDS = ("sbatch", "squeue", "scancel", "srun", "sinfo")
_ALIVE_PERIOD_S = 60.0
_EXPERIMENT = "the experiment's config"
_OPTIONS = "slurm.sbatch_args"
_SHARED_S = 60.0
"""How long a job that runs may take to be seen in the master's directory, seconds."""


class SlurmEngine:
    """Asks Slurm for nodes.

    Args:
        directory: of scripts and of what jobs print; on a file system that all nodes mount.
        state_dir: of the master.
        cluster_id: of the master, by which its jobs are told from others.
        settings: the key ``slurm`` of the master's settings, whose options stand before those of experiments.
        wants_devices: whether slots are accelerators.
    """

    name = "Slurm"

    def __init__(
        self,
        directory: Path,
        state_dir: Path,
        cluster_id: str,
        settings: Mapping[str, object],
        *,
        wants_devices: bool,
    ) -> None:
        self._directory = directory
        self._state_dir = state_dir
        self._mark = f"@{cluster_id.replace('-', '')[:8]}"
        self._settings = settings
        self._wants_devices = wants_devices
        self._down: Mapping[str, int] = {}
        self._parts: dict[str, tuple[Part, ...]] = {}
        self._unseen_s: dict[str, float] = {}
        self._alive_s = -_ALIVE_PERIOD_S
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def capacity(self) -> Mapping[str, int]:
        """Return the tasks, or GPUs, of each node that is up.

        Raises:
            ConnectionError: Slurm does not answer.
        """
        self._touch()  # Also while Slurm is away: the jobs go on, and the master lives.
        code, output, errors = client.run_slurm(list(SINFO))
        if code:
            raise ConnectionError(client.why_away(errors or output, "sinfo", code))
        options = sbatch_args(self._settings, [], "the master's settings")
        found, self._down = (
            {name: min(count, MOST_SLOTS) for name, count in nodes.items()}
            for nodes in (
                parse_nodes(
                    output,
                    wants_devices=self._wants_devices,
                    cpus_per_task=self._cpus_per_task(options),
                    wants_up=wants_up,
                )
                for wants_up in (True, False)
            )
        )
        return found

    def down(self) -> Mapping[str, int]:
        """Return the tasks, or GPUs, of each node that is down or drained."""
        return self._down

    def spare(self) -> Mapping[str, int]:
        """Return the tasks, or GPUs, that no job has.

        There are none while a job of another's waits for nodes.
        """
        self._touch()
        options = sbatch_args(self._settings, [], "the master's settings")
        partition = value_of(options, "--partition", "-p")
        words = [*SPARE, *(["--partition", partition] if partition else [])]
        code, spare, errors = client.run_slurm(words)
        if code:
            raise ConnectionError(client.why_away(errors or spare, "sinfo", code))
        # Only then: who has begun to wait meanwhile counts, too.
        code, output, errors = client.run_slurm(list(WAITING))
        if code:
            raise ConnectionError(client.why_away(errors or output, "squeue", code))
        if others_wait(output, self._mark):
            return {}
        return parse_spare(
            spare, wants_devices=self._wants_devices, cpus_per_task=self._cpus_per_task(options)
        )

    def called(self, job_id: str) -> str:
        """Return its number."""
        return f"job {job_id}"

    def _cpus_per_task(self, options: Sequence[str]) -> int:
        per_task = value_of(options, "--cpus-per-task", "-c") or "1"
        return int(per_task) if per_task.isdecimal() else 1

    def why_never(self, request: JobRequest) -> Sequence[Refusal]:
        """Have sbatch look at the job's script, without a job.

        It needs nothing of the engine's that changes.

        Raises:
            ConnectionError: Slurm does not answer, or does not know its nodes yet.
        """
        name = f"{request.key}{self._mark}"
        try:
            text = script_of(request, self._settings, name, self._directory, self._state_dir)
        except ConfigError as error:
            return [
                Refusal(one.where.removeprefix(f"{_EXPERIMENT}: "), one.got, one.expected, one.fix)
                for one in error.problems
            ]
        except EngineRefusedError:
            refused = ", ".join(refused_options(sbatch_args(request.settings, [], _EXPERIMENT)))
            expected = f"none of {refused}, by which the master finds its jobs"
            return [Refusal(_OPTIONS, render(request.settings["sbatch_args"]), expected, "Leave them out.")]
        with tempfile.NamedTemporaryFile(
            "w", dir=self._directory, prefix="check-", suffix=".sh", encoding="utf-8"
        ) as script:
            script.write(text)
            script.flush()
            found = client.why_never(Path(script.name))
        return [] if found is None else [refusal_of(request, *found)]

    def submit(self, request: JobRequest) -> str:
        """Queue a job that holds nodes, and return its number.

        Raises:
            EngineRefusedError: Slurm refuses it, or could never start it.
            EngineNotNowError: its user has as many jobs in the queue as may be there, or nodes are down or drained.
            ConnectionError: Slurm does not answer.
        """
        self._touch()
        try:
            text = script_of(
                request, self._settings, f"{request.key}{self._mark}", self._directory, self._state_dir
            )
        except ConfigError as error:
            raise EngineRefusedError(str(error)) from error
        script = self._directory / f"{request.key}.sh"
        script.write_text(text, encoding="utf-8")
        try:
            return str(client.submit(script, may_wait=request.may_wait))
        except LaunchError as error:
            if client.is_transient(error):
                raise ConnectionError(str(error)) from error
            if isinstance(error, NodesDownError) or client.is_full(str(error)):
                raise EngineNotNowError(str(error)) from error
            raise EngineRefusedError(str(error)) from error

    def most_pending(self, num_slots: int) -> int:
        """Return as many as other users of a cluster bear with.

        Slurm has an order of its own.
        """
        del num_slots
        return MOST_PENDING

    def jobs(self) -> Sequence[EngineJob]:
        """Return the jobs of this master, those that have just ended among them.

        Raises:
            ConnectionError: Slurm does not answer.
        """
        self._touch()
        code, output, errors = client.run_slurm(list(SQUEUE))
        if code:
            raise ConnectionError(client.why_away(errors or output, "squeue", code))
        return [self._engine_job(job) for job in parse_queue(output) if job.name.endswith(self._mark)]

    def _engine_job(self, job: QueuedJob) -> EngineJob:
        key = job.name.removesuffix(self._mark)
        state = state_of(job)
        if state in ("pending", "ended"):
            self._parts.pop(job.job_id, None)
            is_beginning = state == "pending" and bool(job.nodes)
            has_written = (self._directory / f"{job.job_id}{NODES_SUFFIX}").exists()
            text = job.text if has_written else text_of_unbegun(job, self._directory)
            return EngineJob(job.job_id, key, state, text, is_beginning=is_beginning)
        parts = self._parts_of(job)
        if parts:
            return EngineJob(job.job_id, key, state, job.text, parts)
        since_s = self._unseen_s.setdefault(job.job_id, time.monotonic())
        if state == "running" and time.monotonic() > since_s + _SHARED_S:
            self.cancel(job.job_id)
            text = (
                f"job {job.job_id} runs on {job.nodes}, and has written nothing into {self._directory} for {_SHARED_S:g} s; "
                "expected a directory that all nodes mount. Start the master with such a --state-dir"
            )
            return EngineJob(job.job_id, key, "ended", text)
        return EngineJob(job.job_id, key, "pending", f"{job.text}, where it begins", is_beginning=True)

    def _parts_of(self, job: QueuedJob) -> tuple[Part, ...]:
        """Return what the job's script says of its nodes; nothing while it has not begun."""
        if job.job_id not in self._parts:
            with contextlib.suppress(OSError, ValueError):
                text = (self._directory / f"{job.job_id}{NODES_SUFFIX}").read_text(encoding="utf-8")
                self._parts[job.job_id] = parts_of(text)
                self._unseen_s.pop(job.job_id, None)
        return self._parts.get(job.job_id, ())

    def cancel(self, job_id: str) -> None:
        """End a job, or take it out of the queue.

        Raises:
            ConnectionError: Slurm does not answer.
        """
        (self._directory / f"{job_id}{GIVEN_BACK_SUFFIX}").touch()
        why = client.cancel(int(job_id))
        if client.is_away(why):
            raise ConnectionError(why)
        self._parts.pop(job_id, None)

    def transport(self, job_id: str) -> Transport:
        """Return how programs are started in a job.

        They are steps of it, each with the devices of its slots.
        """
        parts = self._parts.get(job_id, ()) if self._wants_devices else ()
        return SrunTransport(int(job_id), devices={part.host: part.num_slots for part in parts})

    def close(self) -> None:
        """Do nothing: there is no connection."""

    def _touch(self) -> None:
        """Show jobs that their master lives."""
        if time.monotonic() > self._alive_s + _ALIVE_PERIOD_S:
            self._alive_s = time.monotonic()
            with contextlib.suppress(OSError):
                path = self._directory / ALIVE_NAME
                path.touch()
                os.utime(path)


def state_of(job: QueuedJob) -> JobState:
    """Return a job's state as the seam has it. Pure."""
    if job.is_pending:
        return "pending"
    if job.is_over:
        return "ended"
    return "running" if job.why_leaving is None else "leaving"


def text_of_unbegun(job: QueuedJob, directory: Path) -> str:
    """Say how a job is that has written nothing. Pure.

    Also most likely why, where its script could not be begun.
    """
    if job.state != "FAILED" or not job.nodes:
        return job.text
    return (
        f"{job.text}, and has written nothing into {directory}: most likely {job.nodes} does not see this directory. Start the "
        "master with a --state-dir that all nodes mount"
    )


def parts_of(text: str) -> tuple[Part, ...]:
    """Read what a job's script has written: its nodes and the tasks on each. Pure.

    Raises:
        ValueError: it is something else.
    """
    nodes, _, tasks = text.strip().partition(" ")
    names, counts = expand_nodes(nodes), expand_counts(tasks)
    if not names or len(names) != len(counts):
        raise ValueError(f"{text!r} names no nodes and tasks")
    return tuple(Part(name, count) for name, count in zip(names, counts, strict=True))


def refusal_of(request: JobRequest, said: str, fix: str) -> Refusal:
    """Return what Slurm says of a job as a problem of the experiment's config. Pure.

    Args:
        request: what was asked for.
        said: by Slurm, in one line, with the command that has said it.
        fix: what to do.
    """
    slots = f"{request.num_slots} slot{'s' if request.num_slots != 1 else ''}"
    options = request.settings.get("sbatch_args")
    is_for_nodes = client.is_not_yet(said)
    key, got = _OPTIONS, render(options) if options else "not given"
    expected = f"options with which Slurm takes a job of {slots}"
    if request.settings and not options:
        key, got = "slurm", render(request.settings)
    elif is_for_nodes and not options:
        key, got, expected = "resources.slots_per_trial", str(request.num_slots), "a job that Slurm takes"
    return Refusal(key, got, f"{expected}; {said}", fix, is_for_nodes)


def script_of(
    request: JobRequest, settings: Mapping[str, object], name: str, directory: Path, state_dir: Path
) -> str:
    """Return the batch script for a request. Pure.

    Args:
        request: what is asked for.
        settings: of the master, whose options stand before those of the experiment.
        name: of the job.
        directory: of what the job prints.
        state_dir: of the master.

    Raises:
        ConfigError: with what is wrong with its options.
        EngineRefusedError: one of them would make another job of it.
    """
    own = sbatch_args(settings, [], "the master's settings")
    options = [*own, *sbatch_args(request.settings, [], _EXPERIMENT)]
    refused = refused_options(options)
    if refused:
        raise EngineRefusedError(
            f"slurm.sbatch_args has {', '.join(refused)}; expected none of these, by which the master finds its jobs. Leave "
            "them out."
        )
    merged = {**settings, **request.settings}
    lines = request_lines(
        merged,
        options,
        request.num_slots,
        wants_devices=request.wants_devices,
        where=_EXPERIMENT,
    )
    if request.is_on_one_node and not any(line.startswith("--nodes") for line in lines):
        lines.append("--nodes=1")
    if request.kept_off:
        given = value_of(options, "--exclude", "-x")
        names = sorted({*request.kept_off, *((given or "").split(",") if given else ())})
        options.append(f"--exclude={','.join(names)}")
    return holding_script(
        name=name,
        title=request.title,
        request=lines,
        options=options,
        directory=directory,
        state_dir=state_dir,
    )


def check_slurm(settings: Mapping[str, object], directory: Path, tell: Callable[[str], object]) -> None:
    """Refuse, before a master starts, what no job of it could have.

    Args:
        settings: the key ``slurm`` of the master's settings.
        directory: where the script lies that is tried.
        tell: is told that Slurm is asked again, and why.

    Raises:
        LaunchError: Slurm's commands are not here, Slurm does not answer, or it refuses a job of one slot.
        ConfigError: with what is wrong with the options.
    """
    client.require_slurm(*COMMANDS, or_else="take another backend")
    request = JobRequest("check", "a look whether jobs are taken", 1)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    script = directory / "check.sh"
    script.write_text(
        script_of(request, settings, "dstrial-check", directory, directory.parent), encoding="utf-8"
    )
    client.patiently(lambda: client.test(script), tell)


def wants_devices(settings: Mapping[str, object], environ: Mapping[str, str] = os.environ) -> bool:
    """Say whether slots are GPUs.

    They are where options or the partition have some, and ``DS_ACCELERATOR`` is not ``cpu``.
    """
    if environ.get("DS_ACCELERATOR") == "cpu":
        return False
    options = sbatch_args(settings, [], "the master's settings")
    partition = value_of(options, "--partition", "-p") or environ.get("SBATCH_PARTITION")
    return asks_for_devices(options) or bool(settings.get("gpu_type")) or client.has_devices(partition)
