"""One connection to a host, on which lines of JSON go both ways."""

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

from dstrial.hosts import remote
from dstrial.hosts.hostfile import Host
from dstrial.hosts.transport import BEAT_S, GOODBYE, LEASE_S, Refusal, SshTransport, Transport

_CLOSE_S = 2.0
_STDERR_BYTES = 4096
_PIECE_BYTES = 256 * 1024  # of a payload, between which heartbeats are answered


class HostConnection:
    """A program on a host, with JSON lines on its input and output.

    Begins with ``remote.main``, which may become another program. Any thread may call ``send``, which never waits; one thread
    calls ``next``. A heartbeat of the program's is answered with each line that is sent, at least each ``BEAT_S``.

    Attributes:
        heard_s: when the last line came, monotonic seconds.
        lease_ends_s: when what runs there ends at the latest unless a later heartbeat is answered; None before the first.
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
        # It outlives a killed master, and `scancel`, which sends SIGTERM to every process of a job.
        # The end of a connection alone may be that of a cut cable.
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
        """Write a line soon; before it a payload, as lines with a ``piece`` of it each."""
        self._sent.put((message, payload))

    def next(self, timeout_s: float | None = None) -> dict[str, Any] | None:
        """Return the next answer; None once the connection has ended.

        Raises:
            TimeoutError: none came in time.
        """
        try:
            return self._frames.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError(self.host.name) from None

    def ask(self, message: Mapping[str, Any], timeout_s: float) -> dict[str, Any] | None:
        """Return the answer to a request; None if none came in time."""
        self.send(message)
        with contextlib.suppress(TimeoutError):
            return self.next(timeout_s)
        return None

    def wait(self, timeout_s: float) -> None:
        """Wait for the program's end."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._program.wait(timeout_s)

    def errors(self) -> str:
        """Return the end of stderr; complete once the program has ended."""
        if self._program.poll() is not None:
            self._threads[0].join(_CLOSE_S)  # not for ever: a process of ProxyCommand may hold the pipe
        return self._stderr.decode(errors="replace").strip()

    def refusal(self) -> Refusal:
        """Explain why the host has not answered before its connection ended."""
        return self.transport.refusal(self.host.name, self._python, self._program.poll(), self.errors())

    def close(self) -> None:
        """End the connection with a goodbye, and with it the program. Idempotent."""
        assert self._input.stdin is not None
        self._sent.put(None)
        self._input.stdin.close()
        self.wait(_CLOSE_S)
        self.abandon()
        self._input.wait()
        for thread in self._threads:
            thread.join(_CLOSE_S)
        for thread, end in zip(self._threads, (self._program.stderr, self._program.stdout), strict=False):
            # Closing would wait for a thread that reads: a process of ProxyCommand may hold the pipe.
            if end is not None and not thread.is_alive():
                end.close()

    def abandon(self) -> None:
        """Kill the connection without a goodbye."""
        self._program.kill()
        self._program.wait()

    def _write(self) -> None:
        item: tuple[Mapping[str, Any], bytes] | None
        with contextlib.suppress(OSError, ValueError):  # it has ended
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
                    self._take(json.loads(line[len(prefix) :]))
        self._program.wait()
        self._frames.put(None)

    def _take(self, frame: dict[str, Any]) -> None:
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
