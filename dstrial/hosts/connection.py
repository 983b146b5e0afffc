"""One connection to a host, on which lines of JSON go both ways."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import threading
import time
from typing import Any

from dstrial.hosts import remote
from dstrial.hosts.hostfile import Host
from dstrial.hosts.ssh import SshTransport
from dstrial.hosts.transport import Refusal, Transport

_CLOSE_S = 2.0
_STDERR_BYTES = 4096


class HostConnection:
    """A program on a host, with JSON lines on its input and output.

    Begins with ``remote.main``, which may become another program. Any thread may call ``send``, one thread calls ``next``.
    """

    def __init__(self, host: Host, python: str, transport: Transport | None = None) -> None:
        self.host = host
        self.transport: Transport = transport or SshTransport()
        self._python = python
        self._frames: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._stderr = b""
        self.heard_s = time.monotonic()
        """When the last answer came."""
        self._program = subprocess.Popen(
            self.transport.words(host.name, python),
            env=self.transport.environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for us, who pass it on
        )
        self._error_reader, reader = (
            threading.Thread(target=run, name=f"dstrial-{name}-{host.name}", daemon=True)
            for name, run in (("host-errors", self._read_errors), ("host", self._read))
        )
        self._threads = (self._error_reader, reader)
        for thread in self._threads:
            thread.start()

    def send(self, message: dict[str, Any], data: bytes = b"") -> bool:
        """Write a line, and bytes behind it; return whether the connection took them."""
        return self._write(json.dumps(message).encode() + b"\n" + data)

    def ping(self) -> bool:
        """Send a heartbeat."""
        return self._write(b"\n")

    def _write(self, data: bytes) -> bool:
        pipe = self._program.stdin
        if pipe is None:
            return False
        try:
            with self._lock:
                pipe.write(data)
                pipe.flush()
        except (OSError, ValueError):  # it has ended
            return False
        return True

    def next(self, timeout_s: float | None = None) -> dict[str, Any] | None:
        """Return the next answer; None once the connection has ended.

        Raises:
            TimeoutError: none came in time.
        """
        try:
            return self._frames.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError(self.host.name) from None

    def ask(self, message: dict[str, Any], timeout_s: float) -> dict[str, Any] | None:
        """Return the answer to a request; None if none came in time."""
        if not self.send(message):
            return None
        with contextlib.suppress(TimeoutError):
            return self.next(timeout_s)
        return None

    @property
    def exit_code(self) -> int | None:
        """The program's exit code, or the transport's for the end of the connection."""
        return self._program.poll()

    @property
    def has_ended(self) -> bool:
        return self._program.poll() is not None

    def errors(self) -> str:
        """Return the end of stderr; complete once the program has ended."""
        if self.has_ended:
            self._error_reader.join(_CLOSE_S)  # not for ever: a process of ProxyCommand may hold the pipe
        return self._stderr.decode(errors="replace").strip()

    def refusal(self) -> Refusal:
        """Explain why the host has not answered before its connection ended."""
        return self.transport.refusal(self.host.name, self._python, self.exit_code, self.errors())

    def close(self) -> None:
        """End the connection, and with it the program. Idempotent."""
        pipe = self._program.stdin
        if pipe is not None:
            with contextlib.suppress(OSError, ValueError):
                pipe.close()
        try:
            self._program.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._program.kill()
            self._program.wait()
        for thread in self._threads:
            thread.join(_CLOSE_S)
        for end in (self._program.stdout, self._program.stderr):
            if end is not None:
                end.close()

    def abandon(self) -> None:
        """Kill the connection to a host that does not answer."""
        self._program.kill()

    def _read(self) -> None:
        assert self._program.stdout is not None
        prefix = remote.PREFIX.encode()
        for line in self._program.stdout:
            if not line.startswith(prefix):  # a login shell's, for example
                continue
            self.heard_s = time.monotonic()
            with contextlib.suppress(ValueError):
                self._frames.put(json.loads(line[len(prefix) :]))
        self._program.wait()
        self._frames.put(None)

    def _read_errors(self) -> None:
        assert self._program.stderr is not None
        for line in self._program.stderr:
            self._stderr = (self._stderr + line)[-_STDERR_BYTES:]
