"""Start, find and stop the background master of a state directory.

The new process reports through a pipe that it serves requests, or why it failed. To keep commands fast, this module does not
import the server.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dstrial.errors import MasterError
from dstrial.master.client import Client
from dstrial.master.state_directory import MasterRecord, StateDirectory, process_start_time
from dstrial.master.store.views.observe import supervisors

HOST = "127.0.0.1"  # the only address that a master listens on

DEFAULT_PORT = 8080
ENGINES = ("slurm", "ray")  # back ends that get their nodes from an engine with a queue
BACKENDS = ("agent", *ENGINES)
_START_TIMEOUT_S = 60.0  # until the new process serves, in addition to the check of the database
_CHECK_S_PER_GIB = 30.0  # timeout of the database check at startup; ten times the time measured after a kill
_OTHER_TIMEOUT_S = 10.0  # wait for the record of a master that another command starts
_POLL_PERIOD_S = 0.05

STOP_SIGNAL = signal.SIGTERM  # graceful: preempt all trials, wait for their checkpoints, exit

KILL_SIGNAL = signal.SIGUSR1  # immediate: kill all trials, exit


@dataclasses.dataclass(frozen=True, slots=True)
class MasterOptions:
    """Options of ``dstrial up``; None means the value in the settings file."""

    port: int | None = None  # 0: any free port
    num_slots: int | None = None  # number of accelerators, CPU slots, or slots in a Slurm allocation
    config_file: str | None = None
    has_passwords: bool = True  # random passwords for the first users
    hostfile: str | None = None
    include: str = ""  # DeepSpeed's filter syntax for hosts and slots
    exclude: str = ""  # same syntax
    python: str | None = None  # interpreter path on each host
    is_under_slurm: bool = False  # the hosts are the nodes of the master's own Slurm allocation
    backend: str | None = None
    owner_pid: int | None = None  # parent process; the master exits when it dies

    def to_arguments(self) -> list[str]:
        return [json.dumps(dataclasses.asdict(self))]

    @classmethod
    def from_arguments(cls, words: list[str]) -> MasterOptions:
        return cls(**json.loads(words[0]))


def start(
    state: StateDirectory,
    options: MasterOptions,
    *,
    may_take_another_port: bool = False,
    meanwhile: Callable[[], None] = lambda: None,
) -> MasterRecord:
    """Start a master in the background; return its record when it serves requests.

    If another master holds the directory's lock, return the record of that master instead. ``meanwhile`` is called while the
    new process starts. With ``may_take_another_port``, use any free port if the chosen port is taken, unless trials of an
    earlier master run.

    Raises:
        MasterError: the port is taken, trials of an earlier master report to another port, the new master exited during
            startup, or another master holds the lock but does not serve within ten seconds.
    """
    state.make()
    port = choose_port(state, options)
    if may_take_another_port and not live_allocations(state) and not _is_free(port):
        port = 0
    options = dataclasses.replace(options, port=port)
    process, report = _launch(state, options, meanwhile)
    if report is None:
        process.kill()
        process.wait()
        raise MasterError(
            f"the master did not serve within {_start_timeout_s(state):.0f} s; expected it to start. See {state.log_path}."
        )
    message: dict[str, Any] = json.loads(report) if report else {}
    if "record" not in message:
        process.wait()
        other = _wait_for_record(state) if message.get("is_in_use") else None
        if other is not None:
            return other
        raise MasterError(message.get("error") or _startup_failure(state, process.returncode))
    process.returncode = 0  # detach the master: subprocess must not wait for its end
    record = MasterRecord(**{**message["record"], "slots": tuple(message["record"]["slots"])})
    # Wait for a complete request, not only for an open port.
    Client(record.address).get("/info")
    return record


def _launch(
    state: StateDirectory, options: MasterOptions, meanwhile: Callable[[], None]
) -> tuple[subprocess.Popen[bytes], bytes | None]:
    """Start the master's process; return the process and its report (None on timeout).

    The report is JSON that the process writes to a pipe when it serves or has failed to start. The report is b"" if the process
    exits without one.
    """
    ours, theirs = os.pipe()
    with contextlib.closing(os.fdopen(ours, "rb")) as ready:
        try:
            with state.log_path.open("ab") as log:
                process = subprocess.Popen(
                    [
                        sys.executable,
                        *("-m", "dstrial.master.server", str(state.path), str(theirs)),
                        *options.to_arguments(),
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=state.path,
                    pass_fds=(theirs,),
                    start_new_session=True,
                )
        finally:
            os.close(theirs)
        meanwhile()
        report = _read_all(ready.fileno(), time.monotonic() + _start_timeout_s(state))
    return process, report


def _start_timeout_s(state: StateDirectory) -> float:
    try:
        num_bytes = state.database_path.stat().st_size
    except OSError:
        num_bytes = 0
    return _START_TIMEOUT_S + num_bytes / 2**30 * _CHECK_S_PER_GIB


def _wait_for_record(state: StateDirectory) -> MasterRecord | None:
    """Return the record of a master that another command starts; None on timeout."""
    deadline_s = time.monotonic() + _OTHER_TIMEOUT_S
    while time.monotonic() < deadline_s:
        record = state.running()
        if record is not None:
            return record
        time.sleep(_POLL_PERIOD_S)
    return None


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def _read_all(descriptor: int, deadline_s: float) -> bytes | None:
    content = b""
    while True:
        readable, _, _ = select.select([descriptor], [], [], max(0.0, deadline_s - time.monotonic()))
        if not readable:
            return None
        chunk = os.read(descriptor, 65536)
        if not chunk:
            return content
        content += chunk


def _startup_failure(state: StateDirectory, exit_code: int) -> str:
    text = (
        f"the master ended with exit code {exit_code} while it started; expected it to serve. Remove the cause, which is in "
        f"{state.log_path}:"
    )
    return "\n".join([text, *tail(state.log_path, 20)])


def choose_port(state: StateDirectory, options: MasterOptions) -> int:
    """Return the port for a new master.

    This is the port in ``options``, else in the settings file, else the default. If trials of the last
    master still run, the default is that master's port, to which they report.

    Raises:
        MasterError: another port is set while trials of the last master run.
    """
    asked = options.port
    if asked is None and options.config_file is not None:
        from dstrial.master.settings import MasterSettings

        asked = MasterSettings.load(Path(options.config_file)).port
    last = state.read_record()
    if last is None or asked == last.port or not live_allocations(state):
        return DEFAULT_PORT if asked is None else asked
    if asked is None:
        return last.port
    raise MasterError(
        f"the port is {asked}, while trials of the last master run and report to port {last.port}; expected that one. "
        f"Leave --port out, or wait until they have ended."
    )


def live_allocations(state: StateDirectory) -> list[str]:
    """Return ids of allocations whose supervisor process runs; needs no live master."""
    found = supervisors(state)
    if not found:
        return []
    from dstrial.master.backends.backend import SupervisorHandle
    from dstrial.master.backends.local import is_alive

    return [one.allocation_id for one in found if is_alive(SupervisorHandle(one.pid, one.start_time))]


def request_stop(record: MasterRecord, *, is_kill: bool) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(record.pid, KILL_SIGNAL if is_kill else STOP_SIGNAL)
        os.kill(record.pid, signal.SIGCONT)  # a suspended master handles no other signal


def wait_for_end(
    state: StateDirectory,
    record: MasterRecord,
    timeout_s: float,
    on_progress: Callable[[int], None] = lambda _num_allocations: None,
) -> bool:
    """Wait at most ``timeout_s`` for a master to exit; return whether it exited.

    ``on_progress`` is called with the number of running allocations whenever it changes.
    """
    deadline_s = time.monotonic() + timeout_s
    last_count: int | None = None
    next_count_at_s = 0.0
    while process_start_time(record.pid) == record.start_time:
        if time.monotonic() > deadline_s:
            return False
        if time.monotonic() > next_count_at_s:
            next_count_at_s = time.monotonic() + 0.5
            count = len(live_allocations(state))
            if count != last_count:
                last_count = count
                on_progress(count)
        time.sleep(_POLL_PERIOD_S)
    return True


def tail(path: Path, num_lines: int) -> list[str]:
    """Return a text file's last lines without newlines; [] if the file is missing."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return [line.rstrip("\n") for line in collections.deque(file, num_lines)]
    except FileNotFoundError:
        return []
