"""Run allocations on this machine: start, find, watch and end their supervisors.

An allocation's directory has all state that a restarted master needs: ``supervisor.json`` (pid and start time), ``output.log``,
and, once all processes have ended, ``exit.json``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dstrial.checkpoint.completion_marker import is_uuid
from dstrial.config.dotted_keys import dstrial_section
from dstrial.config.experiment_config.dstrial_section import may_install, requirements_of
from dstrial.errors import MasterError
from dstrial.file_writes import remove_tree
from dstrial.harness_paths import WARM_VARIABLE
from dstrial.master import file_limit
from dstrial.master.backends import supervisor, task_venv
from dstrial.master.backends.backend import (
    TRIAL,
    AllocationExit,
    AllocationRequest,
    Backend,
    Node,
    Output,
    RunRef,
    SupervisorHandle,
)
from dstrial.master.backends.devices import Slot
from dstrial.master.backends.environment import (
    MARKER_VARIABLE,
    cluster_info_files,
    command_for,
    trial_environment,
)
from dstrial.master.backends.failures import explain_exit
from dstrial.master.backends.fork_servers import ForkServers, forkable_words
from dstrial.master.clock import now_us
from dstrial.master.store.nodes import OWN_NODE
from dstrial.master.trial_files import read_record
from dstrial.storage_guard import SAVING_DIRECTORY

logger = logging.getLogger(__name__)

_STARTUP_HOOK = "startup-hook.sh"
_KILL_TRIES = 80  # maximum number of attempts to kill an allocation's processes
_KILL_PERIOD_S = 0.1  # interval of attempts to kill
_TRACKER_TRIES = 50  # attempts before resource trackers are killed, too; until then they clean up /dev/shm
trial_umask: int | None = None
"""Umask of entrypoints; None to inherit this process's umask, which keeps a master's files private."""
# Supervisors that are children of this process, by pid; they must be reaped.
_children: dict[int, subprocess.Popen[bytes]] = {}


def prepare(
    request: AllocationRequest,
    *,
    is_warm: bool = True,
    forks_with_accelerators: bool = False,
    watch: Mapping[str, str | None] = MappingProxyType({}),
) -> None:
    """Create an allocation's directory; ``start`` then starts its supervisor.

    ``is_warm`` permits a fork server to start the allocation. For an allocation with accelerators, ``forks_with_accelerators``
    must be true as well. An agent passes ``watch``: the paths of its lease file (``lease``) and pid file (``agent``). The
    supervisor kills the allocation when the lease expires or the agent ends.

    Raises:
        MasterError: the directory cannot be created.
        RequestError: the model definition cannot be unpacked.
    """
    directory, workdir = request.directory, request.directory / "workdir"
    try:
        _write_inputs(request, workdir)
        marker, temporary = _marker_of(directory), _temporary_of(directory)
        command = _command_with_hooks(request, directory)
        environment = trial_environment(request, marker=marker, temporary_directory=temporary)
        is_warm = is_warm and dstrial_section(request.config).get("warm") is not False
        if not is_warm:
            environment[WARM_VARIABLE] = "0"
        _write_private(
            directory / "spec.json",
            {
                "command": command,
                "forkable": _forkable(request, command, environment, is_warm, forks_with_accelerators),
                "python": request.interpreter or sys.executable,
                "working_directory": request.working_directory or str(workdir),
                "temporary_directory": str(temporary),
                "umask": trial_umask,
                "log_bytes": request.log_bytes,
                "environment": environment,
                **watch,
            },
        )
        temporary.mkdir(mode=0o700)
    except OSError as error:
        raise MasterError(
            f"{directory} cannot be created ({error.strerror}); expected a directory for the trial's files. "
            "Free some space, or start the master with another --state-dir."
        ) from error


def _marker_of(directory: Path) -> str:
    """Return the value of ``MARKER_VARIABLE`` in the environment of an allocation."""
    return hashlib.sha256(os.fsencode(directory)).hexdigest()[:32]


def _temporary_of(directory: Path) -> Path:
    return Path(tempfile.gettempdir()) / f"dstrial-{_marker_of(directory)[:10]}"


def _write_inputs(request: AllocationRequest, workdir: Path) -> None:
    from dstrial.master.backends.model_definition import unpack

    directory = request.directory
    if directory.exists():
        remove(directory)
    directory.mkdir(mode=0o700, parents=True)
    workdir.mkdir(mode=0o700)
    unpack(request.model_definition, workdir)
    # A second copy, for checkpoints: the trial may change the first one.
    shutil.copytree(workdir, directory / "model", symlinks=True)
    events = directory / "events"
    for name, target in request.links.items():
        events.mkdir(mode=0o700, exist_ok=True)
        (events / name).symlink_to(target)
    info = directory / "info"
    info.mkdir(mode=0o700)
    for name, content in cluster_info_files(request).items():
        _write_private(info / name, content)


def _forkable(
    request: AllocationRequest,
    command: list[str],
    environment: dict[str, str],
    is_warm: bool,
    has_accelerators: bool,
) -> list[str] | None:
    """Return the command without its interpreter, for a fork server to run.

    None if the command must be started as a new process.
    """
    if request.task_type != TRIAL or not is_warm:
        return None
    if not has_accelerators and any(slot.kind != "cpu" for slot in request.slots):
        return None
    return forkable_words(command, environment, request.interpreter or sys.executable)


def _command_with_hooks(request: AllocationRequest, directory: Path) -> list[str]:
    """Return the command that runs the startup hooks and then the entrypoint.

    If hooks, requirements or the entrypoint may install packages, the command runs them by ``task_venv``.
    """
    command = command_for(request.entrypoint)
    files = directory / "workdir"
    hooks = []
    if request.startup_hook:
        hook = directory / _STARTUP_HOOK
        hook.write_text(request.startup_hook, encoding="utf-8")
        hook.chmod(0o600)
        hooks.append(str(hook))
    has_own_hook = (files / _STARTUP_HOOK).is_file()
    if has_own_hook:
        hooks.append(str(files / _STARTUP_HOOK))
    requirements = requirements_of(request.config)
    shell = shutil.which("bash") or "sh"
    texts = f"{request.startup_hook}\n{shlex.join(command)}"
    if not (has_own_hook or requirements or may_install(texts)):
        return task_venv.hook_command(shell, hooks, command) if hooks else command
    specification = directory / "task_venv.json"
    _write_private(
        specification,
        {
            "root": str(request.venvs_path),
            "task": request.task_name,
            "directory": str(directory),
            "files": str(files),
            "hooks": hooks,
            "requirements": requirements,
            "shell": shell,
            "command": command,
        },
    )
    return [request.interpreter or sys.executable, "-I", task_venv.__file__, str(specification)]


def start(directory: Path, fork_servers: ForkServers | None = None) -> SupervisorHandle:
    """Start the supervisor in a directory that ``prepare`` has created.

    A fork server starts the supervisor if it can; otherwise the supervisor is a new Python process.
    """
    spec = json.loads((directory / "spec.json").read_text(encoding="utf-8"))
    line = ""
    with (directory / "supervisor.log").open("ab") as log:
        if fork_servers is not None:
            pid, refusal = fork_servers.start_supervisor(directory, spec, log.fileno())
            if pid is not None:
                return SupervisorHandle(pid, supervisor.start_time(pid) or "ended")
            line = f"dstrial: the trial starts as a new process, not as a fork: {refusal}" if refusal else ""
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", supervisor.__file__, str(directory), line],
                # The marker identifies the supervisor before it has written its record.
                env={
                    **os.environ,
                    MARKER_VARIABLE: _marker_of(directory),
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                close_fds=True,
            )
        except OSError as error:
            raise MasterError(
                f"{sys.executable} could not be started ({error.strerror}); expected a Python that runs. "
                "Install dstrial again."
            ) from error
    for pid, child in list(_children.items()):
        # Reap supervisors that were still exiting when their record was read.
        if child.poll() is not None:
            _children.pop(pid, None)
    _children[process.pid] = process
    # Not too late: the supervisor's Python is still starting, so it has no children yet.
    file_limit.restore_limit(process.pid)
    started = supervisor.start_time(process.pid)
    return SupervisorHandle(process.pid, started or "ended")


def find(directory: Path) -> SupervisorHandle | None:
    """Return the running supervisor of an allocation's directory; None if none runs."""
    try:
        handle = read_record(directory / "supervisor.json", SupervisorHandle)
    except FileNotFoundError:
        return None
    except ValueError as error:
        logger.warning("no valid record of a supervisor: %s", error)
        return None
    return handle if is_alive(handle) else None


def is_alive(handle: SupervisorHandle) -> bool:
    """Return whether the supervisor runs; False if its pid was reused."""
    child = _children.get(handle.pid)
    if child is not None and child.poll() is not None:
        _children.pop(handle.pid, None)
    return supervisor.start_time(handle.pid) == handle.start_time


def poll_exit(directory: Path, handle: SupervisorHandle | None) -> AllocationExit | None:
    """Return how an allocation ended; None while its supervisor runs.

    If the supervisor has ended, first kill the allocation's remaining processes. An allocation without ``exit.json`` counts as
    lost, one with an invalid ``exit.json`` as failed.
    """
    if handle is not None and is_alive(handle):
        return None
    kill(None, directory)
    try:
        record = read_record(directory / "exit.json", _ExitRecord)
    except FileNotFoundError:
        why = "its supervisor was killed"
        return AllocationExit(128 + signal.SIGKILL, signal.SIGKILL, now_us(), why, True)
    except ValueError as error:
        logger.warning("no valid exit record: %s", error)
        return AllocationExit(1, None, now_us(), f"no valid exit record: {error}", False)
    explanation = explain_exit(record.exit_code, record.signal)
    return AllocationExit(record.exit_code, record.signal, record.time_us, explanation, False)


@dataclasses.dataclass(frozen=True, slots=True)
class _ExitRecord:
    exit_code: int
    signal: int | None
    time_us: int


def terminate(handle: SupervisorHandle) -> None:
    """Have a supervisor send SIGTERM to its entrypoint.

    Once the entrypoint exits, the supervisor kills the allocation's other processes.
    """
    _signal(handle, signal.SIGTERM)


def kill(handle: SupervisorHandle | None, directory: Path, *, leaves_record: bool = True) -> None:
    """Kill every process of an allocation.

    A running supervisor is asked to kill the other processes and to write ``exit.json``. With ``leaves_record=False``, the
    supervisor itself is killed and ``exit.json`` is not written. If the supervisor is dead or killed, kill the processes in its
    session, and those whose environment has the allocation's marker. Then wait some seconds for their end.
    """
    if handle is not None and is_alive(handle):
        _signal(handle, signal.SIGUSR1 if leaves_record else signal.SIGKILL)
        if leaves_record:
            return
    if handle is None:
        with contextlib.suppress(OSError, ValueError):
            handle = read_record(directory / "supervisor.json", SupervisorHandle)
    for kill_try in range(_KILL_TRIES):
        left = _pids_with_variable(f"{MARKER_VARIABLE}={_marker_of(directory)}")
        left |= set() if handle is None else _in_session(handle)
        if not left:
            return
        for pid in left:
            if kill_try < _TRACKER_TRIES and supervisor.is_tracker(pid):
                continue
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_KILL_PERIOD_S)
    logger.warning("processes %s of %s do not end after SIGKILL", sorted(left), directory.name)


def begun_checkpoints(directory: Path) -> list[str]:
    """Return uuids of checkpoints that a trial began to save but has not reported."""
    with contextlib.suppress(OSError):
        return sorted(path.name for path in (directory / SAVING_DIRECTORY).iterdir() if is_uuid(path.name))
    return []


def remove(directory: Path) -> None:
    _delete(_temporary_of(directory))
    _delete(directory)


def _delete(directory: Path) -> None:
    try:
        remove_tree(directory, is_forced=True)
    except OSError as error:
        logger.warning("%s cannot be deleted: %s", directory, error.strerror)


def _signal(handle: SupervisorHandle, number: signal.Signals) -> None:
    if is_alive(handle):
        with contextlib.suppress(ProcessLookupError):
            os.kill(handle.pid, number)
            os.kill(handle.pid, signal.SIGCONT)  # a stopped process handles other signals only after it


def _pids_with_variable(assignment: str) -> set[int]:
    wanted = assignment.encode()
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
                if wanted in _environ(entry).split(b"\0"):
                    found.add(int(entry.name))
    return found


def _in_session(supervisor_: SupervisorHandle) -> set[int]:
    """Return the pids in a dead supervisor's session; empty if its pid was reused."""
    boot = (supervisor.start_time(os.getpid()) or "").partition("/")[0]
    is_of_this_boot = supervisor_.start_time.partition("/")[0] == boot
    leader = supervisor.start_time(supervisor_.pid)
    if not is_of_this_boot or supervisor_.pid == os.getsid(0) or leader not in (None, supervisor_.start_time):
        return set()
    # The kernel does not reuse a session's id while the session has processes.
    return supervisor.members_of_session(supervisor_.pid)


def _environ(process: Path) -> bytes:
    """Return ``environ`` of a ``/proc/PID`` directory; b"" if all threads have ended.

    The file is readable even if only the first thread has ended.
    """
    for directory in (process, *(process / "task").iterdir()):
        with contextlib.suppress(ProcessLookupError):
            return (directory / "environ").read_bytes()
    return b""


def _write_private(path: Path, content: dict[str, Any]) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(content, file)


class LocalBackend(Backend):
    """Runs allocations on the master's own machine.

    ``is_warm`` permits a fork server to start trials. For trials with accelerators, ``forks_with_accelerators`` must be true as
    well.
    """

    def __init__(
        self,
        name: str,
        slots: tuple[Slot, ...],
        fork_servers: ForkServers,
        *,
        is_warm: bool = True,
        forks_with_accelerators: bool = False,
    ) -> None:
        self._node = Node(OWN_NODE, name, "127.0.0.1", slots, None, now_us())
        self._fork_servers = fork_servers
        self._is_warm = is_warm
        self._forks_with_accelerators = forks_with_accelerators
        self._handles: dict[str, SupervisorHandle | None] = {}
        self._exits: dict[str, AllocationExit] = {}

    def nodes(self) -> tuple[Node, ...]:
        return (self._node,)

    def submit(self, request: AllocationRequest, run: RunRef) -> SupervisorHandle | None:
        prepare(request, is_warm=self._is_warm, forks_with_accelerators=self._forks_with_accelerators)
        handle = self._handles[run.allocation_id] = start(run.directory, self._fork_servers)
        return handle

    def find(self, run: RunRef) -> SupervisorHandle | None:
        if run.allocation_id not in self._handles:
            known = run.supervisor
            self._handles[run.allocation_id] = (
                find(run.directory) if known is None else known if is_alive(known) else None
            )
        return self._handles[run.allocation_id]

    def supervisors(self, run: RunRef) -> Mapping[int, SupervisorHandle]:
        handle = self.find(run)
        return {} if handle is None else {OWN_NODE: handle}

    def observe(self, run: RunRef) -> AllocationExit | None:
        name, handle = run.allocation_id, self.find(run)
        if name not in self._exits and (exit_ := poll_exit(run.directory, handle)) is not None:
            self._exits[name] = exit_
        return self._exits.get(name)

    def outputs(self, run: RunRef) -> tuple[Output, ...]:
        return (Output(OWN_NODE, run.directory),)

    def begun_checkpoints(self, run: RunRef) -> list[str]:
        return begun_checkpoints(run.directory)

    def ask_to_stop(self, run: RunRef) -> None:
        handle = self.find(run)
        if handle is not None:
            terminate(handle)

    def kill(self, run: RunRef, *, leaves_record: bool = True) -> None:
        kill(self.find(run), run.directory, leaves_record=leaves_record)

    def forget(self, run: RunRef) -> None:
        self._handles.pop(run.allocation_id, None)
        self._exits.pop(run.allocation_id, None)
        remove(run.directory)

    def begin(self) -> None:
        """Do nothing: the master's own machine needs no connection."""

    def poll(self, *, is_busy: bool) -> None:
        self._fork_servers.poll(is_busy=is_busy)

    def close(self) -> None:
        self._fork_servers.close()
