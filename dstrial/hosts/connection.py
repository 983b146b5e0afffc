"""One connection to a host, over ssh, on which lines of JSON go both ways."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import functools
import json
import queue
import shlex
import subprocess
import threading
import time
import zlib
from pathlib import Path
from typing import Any

from dstrial.hosts import remote
from dstrial.hosts.hostfile import Host

CONNECT_S = 5
"""How long a host may take to answer ssh, seconds."""
# OpenSSH's client, ssh_config(5): it never asks, shares no connection of the user's own, and forwards nothing.
_OPTIONS = {
    "BatchMode": "yes",
    "ConnectTimeout": str(CONNECT_S),
    "ConnectionAttempts": "1",
    "ControlMaster": "no",
    "ControlPath": "none",
    "ClearAllForwardings": "yes",
    "ForwardAgent": "no",
    "ForwardX11": "no",
    "LogLevel": "ERROR",
    "PermitLocalCommand": "no",
    "RemoteCommand": "none",
    "RequestTTY": "no",
    "ServerAliveInterval": "5",
    "ServerAliveCountMax": "4",
    # A thousand lines of a log wait for no acknowledgement; interactive sessions do.
    "IPQoS": "throughput",
}
_CLOSE_S = 2.0
_STDERR_BYTES = 4096


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal:
    """Why a host cannot be used.

    Attributes:
        got: what is the case.
        fix: one imperative sentence.
    """

    got: str
    fix: str


class HostConnection:
    """A program on a host, asked over its input and heard by its output.

    Begins with ``remote.main``, which may become another program. Threads: ``send`` any, ``next`` one.

    Args:
        host: where.
        python: path of the interpreter there.
    """

    def __init__(self, host: Host, python: str) -> None:
        self.host = host
        self._python = python
        self._frames: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._stderr = b""
        self.noise: list[str] = []
        """Lines that are no answers, from the login shell for example; the last ones."""
        self.heard_s = time.monotonic()
        """When the last answer came."""
        options = [word for name, value in _OPTIONS.items() for word in ("-o", f"{name}={value}")]
        self._ssh = subprocess.Popen(
            ["ssh", "-T", *options, "--", host.name, remote_command(python)],
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
        """Say that this side lives."""
        return self._write(b"\n")

    def _write(self, data: bytes) -> bool:
        pipe = self._ssh.stdin
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
        """Return the next answer; None where the connection has ended.

        Raises:
            TimeoutError: none came in time.
        """
        try:
            return self._frames.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError(self.host.name) from None

    def ask(self, message: dict[str, Any], timeout_s: float) -> dict[str, Any] | None:
        """Return the answer to a request; None where none came in time."""
        if not self.send(message):
            return None
        with contextlib.suppress(TimeoutError):
            return self.next(timeout_s)
        return None

    @property
    def exit_code(self) -> int | None:
        """What ssh ended with: the program's exit code, or 255 for the connection's end."""
        return self._ssh.poll()

    @property
    def has_ended(self) -> bool:
        """Whether ssh has."""
        return self._ssh.poll() is not None

    def errors(self) -> str:
        """Return the end of what ssh and the program have printed as errors; all of it, once ssh has ended."""
        if self.has_ended:
            self._error_reader.join(_CLOSE_S)  # not for ever: a process of ProxyCommand may hold the pipe
        return self._stderr.decode(errors="replace").strip()

    def refusal(self) -> Refusal:
        """Say why the host has not answered; for a connection that ended or is given up."""
        return refusal_of(self.host.name, self._python, self.exit_code, self.errors())

    def close(self) -> None:
        """End the connection, and with it the program. Idempotent."""
        pipe = self._ssh.stdin
        if pipe is not None:
            with contextlib.suppress(OSError, ValueError):
                pipe.close()
        try:
            self._ssh.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._ssh.kill()
            self._ssh.wait()
        for thread in self._threads:
            thread.join(_CLOSE_S)
        for end in (self._ssh.stdout, self._ssh.stderr):
            if end is not None:
                end.close()

    def abandon(self) -> None:
        """Give up a host that does not answer, at once."""
        self._ssh.kill()

    def _read(self) -> None:
        assert self._ssh.stdout is not None
        prefix = remote.PREFIX.encode()
        for line in self._ssh.stdout:
            if not line.startswith(prefix):
                self.noise = [*self.noise[-20:], line.decode(errors="replace").rstrip()]
                continue
            self.heard_s = time.monotonic()
            with contextlib.suppress(ValueError):
                self._frames.put(json.loads(line[len(prefix) :]))
        self._ssh.wait()
        self._frames.put(None)

    def _read_errors(self) -> None:
        assert self._ssh.stderr is not None
        for line in self._ssh.stderr:
            self._stderr = (self._stderr + line)[-_STDERR_BYTES:]


@functools.cache
def _packed_source() -> str:
    source = Path(remote.__file__).read_bytes()
    return base64.b64encode(zlib.compress(source, 9)).decode()


def remote_command(python: str) -> str:
    """Return what the login shell of a host is to run."""
    program = f"import base64,zlib;exec(zlib.decompress(base64.b64decode({_packed_source()!r})))"
    # A shell that outlives the program tells its signal by the exit code; sshd alone would tell a closed connection.
    return f"exec sh -c {shlex.quote(f'{shlex.quote(python)} -I -u -c {shlex.quote(program)}; exit $?')}"


def refusal_of(host: str, python: str, exit_code: int | None, errors: str) -> Refusal:
    """Say why ssh has not brought an answer, by its messages (OpenSSH 8 to 10)."""
    text = errors.lower()
    by_hand = f"`ssh {host} true`"
    if exit_code is None:
        return Refusal(
            f"silent (no answer within {CONNECT_S} s)",
            f"Look whether {by_hand} works, and how long the login takes.",
        )
    if "could not resolve hostname" in text:
        return Refusal(
            "unknown: no such name", f"Correct the name, or give {host} an entry in ~/.ssh/config."
        )
    if "remote host identification has changed" in text:
        return Refusal(
            "not the machine that ~/.ssh/known_hosts knows (its host key has changed)",
            f"If that is right, remove the old key by `ssh-keygen -R {host}`.",
        )
    if "host key verification failed" in text:
        return Refusal("not in ~/.ssh/known_hosts", f"Run {by_hand} once and accept its key.")
    if "permission denied" in text:
        return Refusal(
            "refusing the login: permission denied",
            f"Put your public key there (`ssh-copy-id {host}`), until {by_hand} asks for nothing.",
        )
    if "connection refused" in text:
        return Refusal(
            "refusing ssh's port (connection refused)", f"Start sshd on {host}, or correct its port."
        )
    if "timed out" in text or "no route to host" in text or "network is unreachable" in text:
        return Refusal(
            f"unreachable ({_last_line(errors)})", f"Look whether {host} is up and its network is connected."
        )
    if exit_code in (126, 127):
        return Refusal(
            f"without Python at {python}",
            "Install the same environment at the same path on each host, or name another interpreter by --python.",
        )
    return Refusal(
        f"not answering as expected (exit code {exit_code}): {_last_line(errors) or 'nothing was printed'}",
        f"Look at what {by_hand} prints.",
    )


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else ""
