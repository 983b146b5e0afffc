"""Slurm as an engine: a job is a batch job that holds nodes for an allocation."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from dstrial.config.diagnostics import render
from dstrial.errors import ConfigError, LaunchError
from dstrial.hosts.srun import SrunTransport
from dstrial.hosts.transport import Transport
from dstrial.master.backends.backend import Refusal
from dstrial.master.backends.engine import (
    MAX_PENDING,
    EngineJob,
    EngineRefusedError,
    JobRequest,
    JobState,
    NodeCapacity,
    Part,
)
from dstrial.master.store.nodes import MOST_SLOTS
from dstrial.slurm import client
from dstrial.slurm.allocation import expand_counts, expand_nodes
from dstrial.slurm.jobs import SINFO, SQUEUE, Job, is_up, parse_nodes, parse_queue
from dstrial.slurm.script import (
    ALIVE_NAME,
    CANCELLED_SUFFIX,
    NODES_SUFFIX,
    asks_for_devices,
    holding_script,
    refused_options,
    request_lines,
    sbatch_args,
    value_of,
)

COMMANDS = ("sbatch", "squeue", "scancel", "srun", "sinfo")
_ALIVE_PERIOD_S = 60.0  # interval of the master's heartbeats to its jobs (``ALIVE_NAME``)
# Names in error messages: of the two sources of sbatch options, and of the key of these options.
_EXPERIMENT = "the experiment's config"
_MASTER = "the master's settings"
_OPTIONS = "slurm.sbatch_args"
_NODES_FILE_S = 60.0  # timeout for a running job to list its nodes in the master's directory


class SlurmEngine:
    """Holds nodes for a master by batch jobs of Slurm.

    Args:
        directory: for jobs' scripts and output, on a file system that all nodes mount.
        cluster_id: id of the master; part of the names of its jobs.
        settings: key ``slurm`` of the master's settings; experiments' options override these.
        wants_devices: whether slots are accelerators.
    """

    name = "Slurm"

    def __init__(
        self,
        directory: Path,
        cluster_id: str,
        settings: Mapping[str, object],
        *,
        wants_devices: bool,
    ) -> None:
        self._directory = directory
        self._name_suffix = f"@{cluster_id.replace('-', '')[:8]}"
        self._settings = settings
        self._wants_devices = wants_devices
        self._parts: dict[str, tuple[Part, ...]] = {}
        self._unreported_s: dict[str, float] = {}
        self._alive_s = -_ALIVE_PERIOD_S
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def nodes(self) -> Mapping[str, NodeCapacity]:
        """Return the slots of each node: GPUs, or groups of ``--cpus-per-task`` cores."""
        output = self._query(SINFO)
        per_task = value_of(sbatch_args(self._settings, [], _MASTER), "--cpus-per-task", "-c") or "1"
        cpus_per_task = int(per_task) if per_task.isdecimal() else 1
        found = parse_nodes(output, wants_devices=self._wants_devices, cpus_per_task=cpus_per_task)
        return {
            name: NodeCapacity(min(count, MOST_SLOTS), is_up=is_up(state))
            for name, (count, state) in found.items()
        }

    def job_name(self, job_id: str) -> str:
        return f"job {job_id}"

    def _query(self, words: Sequence[str]) -> str:
        """Run a command of Slurm and return its output; send jobs a heartbeat if due.

        Raises:
            ConnectionError: the command fails.
        """
        self._send_heartbeat()  # even if Slurm does not answer, as jobs end without heartbeats
        code, output, errors = client.run_slurm(list(words))
        if code:
            raise ConnectionError(client.failure_reason(errors or output, words[0], code))
        return output

    def unsatisfiable_reasons(self, request: JobRequest) -> Sequence[Refusal]:
        """Return the faults of a job's options, or why ``sbatch --test-only`` rejects it.

        Empty if the job is accepted. Thread-safe.
        """
        try:
            text = self._script(request)
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
            found = client.rejection_of(Path(script.name))
        return [] if found is None else [refusal_of(request, *found)]

    def submit(self, request: JobRequest) -> str:
        """Submit a job that holds nodes; return Slurm's job id."""
        self._send_heartbeat()
        try:
            text = self._script(request)
        except ConfigError as error:
            raise EngineRefusedError(str(error)) from error
        script = self._directory / f"{request.key}.sh"
        script.write_text(text, encoding="utf-8")
        try:
            return str(client.submit(script))
        except LaunchError as error:
            if client.is_away(str(error)):
                raise ConnectionError(str(error)) from error
            raise EngineRefusedError(str(error)) from error

    def _script(self, request: JobRequest) -> str:
        name = f"{request.key}{self._name_suffix}"
        return script_of(request, self._settings, name, self._directory)

    def max_pending(self, num_slots: int) -> int:
        """Return ``MAX_PENDING`` for jobs of any size, because Slurm orders its own queue."""
        del num_slots
        return MAX_PENDING

    def jobs(self) -> Sequence[EngineJob]:
        jobs = parse_queue(self._query(SQUEUE))
        return [self._engine_job(job) for job in jobs if job.name.endswith(self._name_suffix)]

    def _engine_job(self, job: Job) -> EngineJob:
        key = job.name.removesuffix(self._name_suffix)
        state = state_of(job)
        if state in ("pending", "ended"):
            self._parts.pop(job.job_id, None)
            has_written = (self._directory / f"{job.job_id}{NODES_SUFFIX}").exists()
            return EngineJob(job.job_id, key, state, text_of(job, None if has_written else self._directory))
        text, parts = text_of(job), self._parts_of(job)
        if parts:
            return EngineJob(job.job_id, key, state, text, parts)
        since_s = self._unreported_s.setdefault(job.job_id, time.monotonic())
        if state == "running" and time.monotonic() > since_s + _NODES_FILE_S:
            self.cancel(job.job_id)
            text = (
                f"job {job.job_id} runs on {job.nodes}, and has written nothing into {self._directory} for {_NODES_FILE_S:g} s; "
                "expected a directory that all nodes mount. Start the master with such a --state-dir"
            )
            return EngineJob(job.job_id, key, "ended", text)
        return EngineJob(job.job_id, key, "pending", f"{text}, where it begins")

    def _parts_of(self, job: Job) -> tuple[Part, ...]:
        """Return a job's slots by node, from the file that the job's script writes.

        () if the script has not written it yet.
        """
        if job.job_id not in self._parts:
            with contextlib.suppress(OSError, ValueError):
                text = (self._directory / f"{job.job_id}{NODES_SUFFIX}").read_text(encoding="utf-8")
                self._parts[job.job_id] = parts_of(text)
                self._unreported_s.pop(job.job_id, None)
        return self._parts.get(job.job_id, ())

    def cancel(self, job_id: str) -> None:
        (self._directory / f"{job_id}{CANCELLED_SUFFIX}").touch()
        why = client.cancel(int(job_id))
        if client.is_away(why):
            raise ConnectionError(why)
        self._parts.pop(job_id, None)

    def transport(self, job_id: str) -> Transport:
        """Return a transport whose programs see the job's devices on their node."""
        parts = self._parts.get(job_id, ()) if self._wants_devices else ()
        return SrunTransport(int(job_id), devices={part.host: part.num_slots for part in parts})

    def close(self) -> None: ...

    def _send_heartbeat(self) -> None:
        if time.monotonic() > self._alive_s + _ALIVE_PERIOD_S:
            self._alive_s = time.monotonic()
            with contextlib.suppress(OSError):
                (self._directory / ALIVE_NAME).touch()


def state_of(job: Job) -> JobState:
    if job.is_waiting:
        return "pending"
    if job.is_over or job.state == "PREEMPTED":  # not requeued: the script has --no-requeue
        return "ended"
    return "running" if job.leaving_reason is None else "leaving"


def text_of(job: Job, unwritten: Path | None = None) -> str:
    """Return a job's state for users, with the likely reason of a failure. Pure.

    ``unwritten`` is the directory to which the job's script should have written its nodes, if it has not; None otherwise.
    """
    state = state_of(job)
    if state == "leaving":
        return f"job {job.job_id} {job.leaving_reason}"
    text = f"job {job.job_id}{' has ended' if state == 'ended' else ''}: {job.described}"
    if job.state != "FAILED" or not job.nodes or unwritten is None:
        return text
    return (
        f"{text}, and has written nothing into {unwritten}: most likely {job.nodes} does not see this directory. Start the "
        "master with a --state-dir that all nodes mount"
    )


def parts_of(text: str) -> tuple[Part, ...]:
    """Parse the node names and task counts that a job's script wrote to a file. Pure.

    Raises:
        ValueError: the text does not have this format.
    """
    nodes, _, tasks = text.strip().partition(" ")
    names, counts = expand_nodes(nodes), expand_counts(tasks)
    if not names or len(names) != len(counts):
        raise ValueError(f"{text!r} names no nodes and tasks")
    return tuple(Part(name, count) for name, count in zip(names, counts, strict=True))


def refusal_of(request: JobRequest, message: str, fix: str) -> Refusal:
    """Convert sbatch's error message to an error in the experiment's config. Pure.

    ``request`` is the rejected request. ``fix`` says what users can do.
    """
    slots = f"{request.num_slots} slot{'s' if request.num_slots != 1 else ''}"
    options = request.settings.get("sbatch_args")
    is_for_nodes = client.lacks_nodes(message)
    key, got = _OPTIONS, render(options) if options else "not given"
    expected = f"options with which Slurm takes a job of {slots}"
    if request.settings and not options:
        key, got = "slurm", render(request.settings)
    elif is_for_nodes and not options:
        key, got, expected = "resources.slots_per_trial", str(request.num_slots), "a job that Slurm takes"
    return Refusal(key, got, f"{expected}; {message}", fix, is_for_nodes)


def script_of(request: JobRequest, settings: Mapping[str, object], name: str, directory: Path) -> str:
    """Return the batch script of the job that serves a request. Pure.

    ``settings`` is key ``slurm`` of the master's settings; ``name`` is the job's name in Slurm; the job writes its files to
    ``directory``.

    Raises:
        ConfigError: options of the request or the settings are invalid.
        EngineRefusedError: an option is not allowed (``refused_options``).
    """
    own = sbatch_args(settings, [], _MASTER)
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
    if request.excluded_nodes:
        given = value_of(options, "--exclude", "-x")
        names = sorted({*request.excluded_nodes, *((given or "").split(",") if given else ())})
        options.append(f"--exclude={','.join(names)}")
    return holding_script(
        name=name,
        title=request.title,
        request=lines,
        options=options,
        directory=directory,
    )


def check_slurm(settings: Mapping[str, object], directory: Path) -> None:
    """Raise unless Slurm accepts a one-slot test job (script in ``directory``).

    Raises:
        LaunchError: Slurm is not installed, does not answer, or rejects the job.
        ConfigError: the settings' options are invalid.
    """
    client.require_slurm(*COMMANDS, or_else="take another backend")
    request = JobRequest("check", "a check whether jobs are accepted", 1)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    script = directory / "check.sh"
    text = script_of(request, settings, "dstrial-check", directory)
    script.write_text(text, encoding="utf-8")
    client.test(script)


def wants_devices(settings: Mapping[str, object], environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether slots are GPUs.

    True if the sbatch options or ``gpu_type`` request GPUs, or the partition has GPUs; always False with
    ``DS_ACCELERATOR=cpu``. ``settings`` is key ``slurm`` of the master's settings.
    """
    if environ.get("DS_ACCELERATOR") == "cpu":
        return False
    options = sbatch_args(settings, [], _MASTER)
    partition = value_of(options, "--partition", "-p") or environ.get("SBATCH_PARTITION")
    return asks_for_devices(options) or bool(settings.get("gpu_type")) or client.has_devices(partition)
