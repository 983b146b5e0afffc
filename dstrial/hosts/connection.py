"""A connection to a program on a host, which exchanges lines of JSON."""

from __future__ import annotations

import contextlib
import json
import queue
import shlex
import subprocess
import threading
import time
from base64 import b64encode
from collections.abc import Mapping
from typing import Any

from dstrial.errors import HostProblem
from dstrial.hosts import remote
from dstrial.hosts.hostfile import Host
from dstrial.hosts.transport import BEAT_S, GOODBYE, LEASE_S, SshTransport, Transport

_CLOSE_S = 2.0  # timeout of each step of ``close``: end of the local process, end of a thread
_STDERR_BYTES = 4096  # size of the kept end of the local process's stderr
_PIECE_BYTES = 256 * 1024  # size of a payload's pieces; heartbeats are answered between pieces


class HostConnection:
    """Runs a program on a host through a local process, and exchanges JSON lines.

    The local process is ssh, srun or Ray's relay. The program is ``remote.main``, which replaces itself by the master's agent on
    request. Any thread may call ``send``, which never blocks; one thread calls ``next``. After the agent's first
    heartbeat, a line is sent to the agent at least every ``BEAT_S`` seconds; each line acknowledges the last heartbeat.

    Attributes:
        heard_s: time of the last received line, monotonic seconds.
        lease_ends_s: time at which the agent's lease ends, monotonic seconds; None before the first heartbeat. The agent then
            kills its allocations, unless a later heartbeat has been acknowledged.
    """

    def __init__(self, host: Host, python: str, transport: Transport | None = None) -> None:
        self.host = host
        self.transport: Transport = transport or SshTransport()
        self.heard_s = time.monotonic()
        self.lease_ends_s: float | None = None
        self._python = python
        self._frames: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._sent: queue.SimpleQueue[tuple[Mapping[str, Any], bytes] | None] = queue.SimpleQueue()
        self._beat: float | None = None
        self._stderr = b""
        # Sends ``GOODBYE`` when this process closes the pipe or is killed; an agent that gets none assumes a network failure.
        # Ignores SIGTERM, which `scancel` sends to every process of a job.
        self._input = subprocess.Popen(
            ["sh", "-c", f"trap '' HUP INT TERM; cat; printf '\\n%s\\n' {shlex.quote(GOODBYE)}"],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            self._program = subprocess.Popen(
                self.transport.words(host.name, python),
                env=self.transport.environment(),
                stdin=self._input.stdout,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is handled by this process
            )
        finally:
            assert self._input.stdout is not None
            self._input.stdout.close()
        self._threads = [
            threading.Thread(target=run, name=f"dstrial-host-{host.name}", daemon=True)
            for run in (self._read_errors, self._read, self._write)
        ]
        for thread in self._threads:
            thread.start()

    def send(self, message: Mapping[str, Any], payload: bytes = b"") -> None:
        """Queue a message, to be sent to the program as a line of JSON.

        ``payload`` is sent before the message, in JSON lines with base64 text.
        """
        self._sent.put((message, payload))

    def next(self, timeout_s: float | None = None) -> dict[str, Any] | None:
        """Return the program's next line, parsed; None if the connection has ended.

        Raises:
            TimeoutError: no line has come within the timeout.
        """
        try:
            return self._frames.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError(self.host.name) from None

    def ask(self, message: Mapping[str, Any], timeout_s: float) -> dict[str, Any] | None:
        """Send a request and return the next line; None after a timeout or a disconnect."""
        self.send(message)
        with contextlib.suppress(TimeoutError):
            return self.next(timeout_s)
        return None

    def wait(self, timeout_s: float) -> None:
        """Wait until the local process (ssh, srun or relay) ends, at most ``timeout_s``."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._program.wait(timeout_s)

    def errors(self) -> str:
        """Return the last 4 KiB that the local process (ssh, srun, relay) wrote to stderr."""
        if self._program.poll() is not None:
            self._threads[0].join(_CLOSE_S)  # a process of ProxyCommand may keep the pipe open for ever
        return self._stderr.decode(errors="replace").strip()

    def start_problem(self) -> HostProblem:
        """Return why the program on the host has not answered, and what users can do."""
        return self.transport.start_problem(self.host.name, self._python, self._program.poll(), self.errors())

    def close(self) -> None:
        """Send the master's goodbye to the agent; end the local process and the threads.

        Idempotent.
        """
        assert self._input.stdin is not None
        self._sent.put(None)
        self._input.stdin.close()
        self.wait(_CLOSE_S)
        self.abandon()
        self._input.wait()
        for thread in self._threads:
            thread.join(_CLOSE_S)
        for thread, end in zip(self._threads, (self._program.stderr, self._program.stdout), strict=False):
            # Closing blocks while a thread reads: a process of ProxyCommand may keep the pipe open.
            if end is not None and not thread.is_alive():
                end.close()

    def abandon(self) -> None:
        """Kill the local process (ssh, srun or relay) without a goodbye to the agent.

        The agent assumes a network failure, and kills its allocations when its lease ends.
        """
        self._program.kill()
        self._program.wait()

    def _write(self) -> None:
        item: tuple[Mapping[str, Any], bytes] | None
        with contextlib.suppress(OSError, ValueError):  # the connection has ended
            while True:
                item = ({}, b"")
                with contextlib.suppress(queue.Empty):
                    item = self._sent.get(timeout=BEAT_S)
                if item is None:
                    return
                message, payload = item
                for at in range(0, len(payload), _PIECE_BYTES):
                    self._write_line({"piece": b64encode(payload[at : at + _PIECE_BYTES]).decode()})
                self._write_line(message)

    def _write_line(self, message: Mapping[str, Any]) -> None:
        assert self._input.stdin is not None
        if self._beat is not None:
            message = {**message, "beat": self._beat}
        data = json.dumps(message).encode() + b"\n" if message else b""
        while data:
            data = data[self._input.stdin.write(data) :]

    def _read(self) -> None:
        assert self._program.stdout is not None
        prefix = remote.PREFIX.encode()
        for line in self._program.stdout:
            if line.startswith(prefix):  # a login shell prints other lines
                with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError):
                    self._handle_line(json.loads(line[len(prefix) :]))
        self._program.wait()
        self._frames.put(None)

    def _handle_line(self, frame: dict[str, Any]) -> None:
        self.heard_s = time.monotonic()
        beat = frame.pop("beat", None)
        if beat is not None:
            self.lease_ends_s = self.heard_s + max(float(frame.pop("lease_s")), LEASE_S)
            self._beat = beat
        if frame:
            self._frames.put(frame)

    def _read_errors(self) -> None:
        assert self._program.stderr is not None
        for line in self._program.stderr:
            self._stderr = (self._stderr + line)[-_STDERR_BYTES:]
