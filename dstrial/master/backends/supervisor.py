"""The supervisor: a process that runs an allocation and outlives the master.

    python -I -S supervisor.py DIRECTORY [LINE]

LINE, if any, is logged first. If a fork server forked this process, the entrypoint is also started as a fork, if possible. This
module uses only the standard library.

The supervisor leads a session and adopts orphaned descendants. It starts the entrypoint in a new process group and appends the
entrypoint's output to ``output.log``. When the entrypoint has ended, the supervisor kills every descendant and writes
``exit.json``. SIGTERM is forwarded to the entrypoint's process group; at SIGUSR1 the supervisor kills all descendants. If
``spec.json`` names a lease or an agent's pid file, the end of the lease or the agent also kills all descendants. Then the
supervisor writes no ``exit.json``.

A line of ``output.log`` is ``<microseconds since 1970> <o|e> <text>``; o is stdout, e stderr. Of the output beyond the log's
size limit, only the last ``_TAIL_BYTES`` are logged, when the entrypoint ends.
"""

import collections
import contextlib
import ctypes
import errno
import fcntl
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_CHUNK_BYTES = 1 << 18  # maximum of one read of output
_MAX_LINE_BYTES = 8192  # longer lines are split
_TRACKERS_END_S = 10.0  # grace period of multiprocessing's resource trackers, to clean up /dev/shm
_TRAILING_OUTPUT_S = 2.0  # timeout for reading the pipes after the entrypoint's end
_TABLE_READS = 5  # attempts to get a table from /proc in which no parent is missing
_TICK_S = 0.5  # interval of checks of the lease and signals
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # errors that end when the disk has space again
_TAIL_BYTES = 1 << 20  # size of the last lines that are kept of output beyond the limit


def main(directory: str, line: str = "") -> None:
    """Run the allocation in ``directory`` until it ends; log ``line`` unless empty."""
    os.chdir(directory)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    with open("spec.json", encoding="utf-8") as file:
        spec: dict[str, Any] = json.load(file)
    # Lock the temporary directory, so that systemd-tmpfiles does not clean it (tmpfiles.d(5)).
    with contextlib.suppress(OSError):
        fcntl.flock(
            os.open(spec["temporary_directory"], os.O_RDONLY | os.O_DIRECTORY), fcntl.LOCK_EX | fcntl.LOCK_NB
        )
    requests = _Requests(spec.get("lease"), spec.get("agent"))
    write_json("supervisor.json", {"pid": os.getpid(), "start_time": start_time(os.getpid())})
    log = os.open("output.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        child, refusal = _start(spec, libc)
    except OSError as error:
        os.write(log, b"%d e %s\n" % (_now_us(), f"{spec['command'][0]}: {error.strerror}".encode()))
        _write_exit(requests, 127 if isinstance(error, FileNotFoundError) else 126, None)
        return
    output = _Output(child, requests, log, spec.get("log_bytes"))
    output.log_line(line or refusal)
    status = output.follow()
    if output.is_orphaned:
        return
    _write_exit(requests, status if status >= 0 else 128 - status, -status if status < 0 else None)


def _write_exit(requests: "_Requests", exit_code: int, signal_number: int | None) -> None:
    record = {"exit_code": exit_code, "signal": signal_number, "time_us": _now_us()}
    while True:
        try:
            write_json("exit.json", record)
            return
        except OSError as error:
            if not requests.should_retry(error):
                return


class _Requests:
    """Records SIGTERM and SIGUSR1; ``wakeup`` becomes readable after each signal.

    ``lease`` and ``agent`` are the arguments of :func:`end_reason`; ``lease`` is None for an allocation that needs no lease.
    """

    def __init__(self, lease: "str | None", agent: "str | None") -> None:
        self._lease = lease
        self._agent = agent
        self.terminate = False
        self.kill = False
        self.wakeup, write_end = os.pipe()
        os.set_blocking(self.wakeup, False)
        os.set_blocking(write_end, False)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._on_terminate)
        signal.signal(signal.SIGUSR1, self._on_kill)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def should_retry(self, error: OSError) -> bool:
        """Return whether to retry a write that failed with ``error``; sleep if so.

        True only for errors of a full disk, and only until the allocation is killed or its directory is deleted.
        """
        if error.errno not in _FULL:
            return False
        if self.end_reason():
            self.kill = True
        if not self.kill:
            time.sleep(_TICK_S)
        return not self.kill and os.path.exists("spec.json")

    def end_reason(self) -> str:
        """Return why the lease or the agent has ended; "" if neither has."""
        return "" if self._lease is None else end_reason(self._lease, self._agent)

    def _on_terminate(self, *_: object) -> None:
        self.terminate = True

    def _on_kill(self, *_: object) -> None:
        self.kill = True


class _Fork:
    """A forked entrypoint, with the attributes of ``Popen`` that the supervisor uses."""

    def __init__(self, pid: int, stdout: int, stderr: int) -> None:
        self.pid = pid
        self.stdout, self.stderr = os.fdopen(stdout, "rb"), os.fdopen(stderr, "rb")
        self.returncode: int | None = None


def _start(spec: dict[str, Any], libc: ctypes.CDLL) -> "tuple[subprocess.Popen[bytes] | _Fork, str]":
    """Start the entrypoint; return (process, log line).

    The line says why the entrypoint could not be started as a fork; "" if it could or no fork was tried.
    """

    def in_child() -> None:
        os.setpgid(0, 0)
        if spec.get("umask") is not None:
            os.umask(spec["umask"])
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)

    fork, refusal = _start_in_spare(spec)
    if fork is not None:
        return fork, ""
    process = subprocess.Popen(
        spec["command"],
        cwd=spec["working_directory"],
        env=spec["environment"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=in_child,
    )
    return process, refusal


def _start_in_spare(spec: dict[str, Any]) -> "tuple[_Fork | None, str]":
    """Start the entrypoint in this process's spare child, which waits for a program.

    Returns (process, ""), or (None, line) if there is no such child or it refused. In the latter case, the caller must start a
    new process and log the line, unless the line is empty.
    """
    client = sys.modules.get("dstrial.fork_server.client")  # imported only if this process is a fork
    if client is None or client.fork.spare is None:
        return None, ""
    program = client.Program(
        spec["forkable"],
        spec["environment"],
        spec["working_directory"],
        leads="group",
        umask=spec.get("umask"),
        ends_with_parent=True,
        has_spare=True,
    )
    (stdout, out), (stderr, err), null = os.pipe(), os.pipe(), os.open(os.devnull, os.O_RDONLY)
    try:
        # The spare becomes the entrypoint: it is already this process's only child.
        pid = client.start_program(client.fork.spare, program, [null, out, err])
        return _Fork(pid, stdout, stderr), ""
    except client.ForkRefusedError as reason:
        os.close(stdout)
        os.close(stderr)
        return None, f"dstrial: the trial starts as a new process, not as a fork: {reason}"
    finally:
        for number in (null, out, err):
            os.close(number)


class _Output:
    """Logs the entrypoint's output; kills all descendants when the entrypoint ends."""

    def __init__(
        self,
        child: "subprocess.Popen[bytes] | _Fork",
        requests: _Requests,
        log: int,
        log_bytes: "int | None",
    ) -> None:
        self._child = child
        self._requests = requests
        self._log = log
        self._bytes_left = log_bytes  # until the limit of the log; None without a limit
        self._tail: collections.deque[bytes] | None = None  # last output beyond the limit
        self._num_left_out = 0  # lines beyond the limit that are not in the tail
        self._partial_lines: dict[int, bytes] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(requests.wakeup, selectors.EVENT_READ)
        self._streams: dict[int, bytes] = {}
        for stream, tag in ((child.stdout, b"o"), (child.stderr, b"e")):
            if stream is not None:
                os.set_blocking(stream.fileno(), False)
                self._selector.register(stream.fileno(), selectors.EVENT_READ)
                self._streams[stream.fileno()] = tag
        self._status: int | None = None
        self.is_orphaned = False

    def follow(self) -> int:
        """Log output and handle requests until all processes have ended.

        Returns the entrypoint's exit code, or -n if signal n ended the entrypoint.
        """
        was_terminated = False
        while True:
            self._wait(_TICK_S)
            self._reap()
            why = "" if self.is_orphaned else self._requests.end_reason()
            if why:
                self.is_orphaned = self._requests.kill = True
                self.log_line(f"{why}: killing all processes")
            if self._requests.kill:
                kill_descendants(self._is_spared)
            elif self._requests.terminate and not was_terminated:
                was_terminated = True
                _signal_group(self._child.pid, signal.SIGTERM)
            if self._status is None:
                continue
            if was_terminated and not self._requests.kill and _is_group_alive(self._child.pid):
                continue
            break
        began_s = time.monotonic()
        while True:
            passed_s = time.monotonic() - began_s
            awaits_output = bool(self._streams) and passed_s < _TRAILING_OUTPUT_S
            is_patient = passed_s < _TRACKERS_END_S
            if (
                not kill_descendants(self._is_spared if is_patient else lambda _pid: False)
                and not awaits_output
            ):
                break
            self._wait(0.02)
            self._reap()
            if not self._streams and not descendants(os.getpid()):
                break
        for descriptor in list(self._streams):
            self._close_stream(descriptor)
        if self._tail is not None:
            self._write(
                b"%d e %d lines are left out here\n" % (_now_us(), self._num_left_out) + b"".join(self._tail)
            )
        with contextlib.suppress(OSError):
            os.fsync(self._log)
        return self._status

    def _is_spared(self, pid: int) -> bool:
        """Return whether not to kill a process: a resource tracker cleans up /dev/shm."""
        return pid != self._child.pid and is_tracker(pid)

    def _wait(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            if key.fd == self._requests.wakeup:
                with contextlib.suppress(BlockingIOError):
                    os.read(key.fd, 4096)
            else:
                self._read(key.fd)

    def _read(self, descriptor: int) -> None:
        try:
            data = os.read(descriptor, _CHUNK_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._close_stream(descriptor)
            return
        data = self._partial_lines.pop(descriptor, b"") + data
        data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, rest = data.split(b"\n")
        if len(rest) > _MAX_LINE_BYTES:
            lines, rest = [*lines, rest], b""
        if rest:
            self._partial_lines[descriptor] = rest
        if lines:
            self._append(descriptor, lines)

    def _append(self, descriptor: int, lines: list[bytes]) -> None:
        prefix = b"%d %s " % (_now_us(), self._streams[descriptor])
        if any(len(line) > _MAX_LINE_BYTES for line in lines):
            lines = [
                line[at : at + _MAX_LINE_BYTES]
                for line in lines
                for at in range(0, max(len(line), 1), _MAX_LINE_BYTES)
            ]
        data = prefix + (b"\n" + prefix).join(lines) + b"\n"
        if self._bytes_left is not None:
            self._bytes_left -= len(data)
            if self._bytes_left < 0 and self._tail is None:
                self._tail = collections.deque()
                self._write(b"%d e the log has reached its size limit: only its end is added\n" % _now_us())
        if self._tail is None:
            self._write(data)
            return
        self._tail.append(data)
        while len(self._tail) > 1 and sum(map(len, self._tail)) > _TAIL_BYTES:
            self._num_left_out += self._tail.popleft().count(b"\n")

    def _write(self, data: bytes) -> None:
        while data:
            try:
                data = data[os.write(self._log, data) :]
            except OSError as error:
                # While the supervisor waits, the entrypoint blocks once its pipe is full.
                if not self._requests.should_retry(error):
                    return

    def log_line(self, text: str) -> None:
        """Log a line as stderr of the entrypoint; no-op if it is empty or stderr closed."""
        for descriptor, tag in self._streams.items():
            if text and tag == b"e":
                self._append(descriptor, [text.encode()])

    def _close_stream(self, descriptor: int) -> None:
        rest = self._partial_lines.pop(descriptor, b"")
        if rest:
            self._append(descriptor, [rest])
        self._selector.unregister(descriptor)
        del self._streams[descriptor]

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._child.pid:
                self._status = os.waitstatus_to_exitcode(status)
                self._child.returncode = self._status


def descendants(pid: int) -> "list[int]":
    """Return pids of a process's running descendants, parents first."""
    for _ in range(_TABLE_READS):
        table = _process_table()
        parents = {process: int(fields[1]) for process, fields in table.items()}
        # If a parent ended during the read, its children have a new parent: read again.
        if all(parent in parents or parent == 0 for parent in parents.values()):
            break
    below = {process for process, parent in parents.items() if parent == pid}
    found: dict[int, None] = {}
    while below:
        found.update(dict.fromkeys(below))
        below = {process for process, parent in parents.items() if parent in below}.difference(found)
    return [process for process in found if not _has_ended(table[process])]


def _process_table() -> "dict[int, list[bytes]]":
    """Return pid -> fields of :func:`_stat`, for every process."""
    found = {int(name): _stat(name) for name in os.listdir("/proc") if name.isdigit()}
    return {pid: fields for pid, fields in found.items() if fields}


def kill_descendants(is_spared: Callable[[int], bool]) -> bool:
    """Kill this process's descendants except spared ones; return whether any ran.

    ``is_spared`` is called with a pid just before each signal. The result is also True if only spared ones ran. Parents are
    killed first: a shell whose child is killed would exit with 137 instead of by the signal.
    """
    found = descendants(os.getpid())
    for pid in found:
        if not is_spared(pid):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
    return bool(found)


def is_tracker(pid: int) -> bool:
    """Return whether a process is Python's multiprocessing resource tracker.

    If the tracker is killed, shared memory in /dev/shm (``sem.mp-*``, ``psm_*``) is never deleted. Source: CPython 3.10 to 3.13
    ``multiprocessing/resource_tracker.py``, ``ensure_running``.
    """
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().split(b"\0")
    except OSError:
        return False
    return any(
        word.startswith(b"from multiprocessing.resource_tracker import main;main(") for word in words[1:]
    )


def _stat(pid: str) -> list[bytes]:
    """Return the fields of ``/proc/PID/stat`` after the name; [] for an ended process.

    The fields (proc(5)) start with state, parent, process group and session; the eighteenth is the number of threads.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return []


def _has_ended(fields: list[bytes]) -> bool:
    """Return whether all threads of a process have ended, from its :func:`_stat`."""
    return fields[0] == b"X" or (fields[0] == b"Z" and int(fields[17]) <= 1)


def start_time(pid: int) -> str | None:
    """Return a process's ``BOOT_ID/START_TIME``; None if the process has ended."""
    fields = _stat(str(pid))
    if not fields or fields[0] in (b"Z", b"X"):
        return None
    with open("/proc/sys/kernel/random/boot_id", encoding="utf-8") as file:
        return f"{file.read().strip()}/{fields[19].decode()}"


def end_reason(lease: str, agent: "str | None") -> str:
    """Return why the lease or the agent has ended; "" if neither has.

    ``lease`` is the path of the lease file, see :func:`lease_left_s`. ``agent`` is the path of the agent's pid file; None if
    only the lease counts.
    """
    if lease_left_s(lease) < 0:
        return "the master has not answered for too long"
    if agent is None:
        return ""
    seen = _read_json(agent)
    # A new agent writes its record before it kills the old agent, so read the record again.
    if seen is None or start_time(seen["pid"]) == seen["start_time"] or _read_json(agent) != seen:
        return ""
    return "the agent of the job has ended"


def _read_json(path: str) -> "dict[str, Any] | None":
    with contextlib.suppress(OSError), open(path, encoding="utf-8") as file:
        found: dict[str, Any] = json.load(file)
        return found
    return None


def lease_left_s(path: str) -> float:
    """Return the seconds until a lease expires; negative if expired or missing.

    The modification time of the file ``path`` is the lease's end in CLOCK_BOOTTIME seconds. It can be set even on a full disk.
    0 if the file system does not answer.
    """
    try:
        return os.stat(path).st_mtime - time.clock_gettime(time.CLOCK_BOOTTIME)
    except FileNotFoundError:
        return -1.0
    except OSError:
        return 0.0  # the file system does not answer


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _is_group_alive(group: int) -> bool:
    return any(int(fields[2]) == group and not _has_ended(fields) for fields in _process_table().values())


def members_of_session(session: int) -> "set[int]":
    """Return the pids of a session's running processes."""
    table = _process_table()
    return {pid for pid, fields in table.items() if int(fields[3]) == session and not _has_ended(fields)}


def write_json(name: str, value: dict[str, Any]) -> None:
    """Atomically write ``value`` to file ``name`` in the current directory."""
    temporary = f".{name}.new"
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, name)


def _now_us() -> int:
    return time.time_ns() // 1000


if __name__ == "__main__":
    main(*sys.argv[1:])
