"""Tunnels TCP connections of trials to their master through another connection.

Each end has a socket a stream. Bytes read from it become a frame with the stream's number, and bytes of a frame are written to
it. Only the loopback address of the trial's host is listened on.
"""

from __future__ import annotations

import base64
import contextlib
import queue
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_CHUNK_BYTES = 1 << 16
_WAITING_CHUNKS = 1024
# linux net/tcp_states.h
_ESTABLISHED = "01"


class Streams:
    """The streams of one end of a tunnel; thread-safe. ``send`` may wait."""

    def __init__(self, send: Callable[[Mapping[str, Any]], None]) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._open: dict[int, _Stream] = {}

    def add(self, number: int, connection: socket.socket) -> None:
        """Forward a connection from now on, and close it at its end."""
        stream = _Stream(number, connection, self._send, self._forget)
        with self._lock:
            self._open[number] = stream
        stream.start()

    def take(self, frame: Mapping[str, Any]) -> None:
        """Process a frame of the other end; never waits."""
        with self._lock:
            stream = self._open.get(int(frame["stream"]))
        if stream is not None:
            stream.put(None if frame.get("end") else base64.b64decode(frame["data"]))
        elif not frame.get("end"):
            self._send({"stream": frame["stream"], "end": True})

    def close(self) -> None:
        """Close all connections: the tunnel is gone."""
        with self._lock:
            found = list(self._open.values())
        for stream in found:
            stream.abandon()

    def _forget(self, number: int) -> None:
        with self._lock:
            self._open.pop(number, None)


class _Stream:
    """One connection: a thread reads from it, another writes to it."""

    def __init__(
        self,
        number: int,
        connection: socket.socket,
        send: Callable[[Mapping[str, Any]], None],
        forget: Callable[[int], None],
    ) -> None:
        self._number, self._connection, self._send, self._forget = number, connection, send, forget
        self._arrived: queue.Queue[bytes | None] = queue.Queue(_WAITING_CHUNKS)
        self._lock = threading.Lock()
        self._num_running = 2

    def start(self) -> None:
        for run in (self._read, self._write):
            threading.Thread(target=run, name=f"dstrial-stream-{self._number}", daemon=True).start()

    def put(self, data: bytes | None) -> None:
        """Write soon; None is the end. A connection that accepts nothing is closed."""
        try:
            self._arrived.put_nowait(data)
        except queue.Full:
            self.abandon()

    def abandon(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(queue.Full):
            self._arrived.put_nowait(None)

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            while data := self._connection.recv(_CHUNK_BYTES):
                self._send({"stream": self._number, "data": base64.b64encode(data).decode()})
        self._send({"stream": self._number, "end": True})
        self._done()

    def _write(self) -> None:
        with contextlib.suppress(OSError):
            while (data := self._arrived.get()) is not None:
                self._connection.sendall(data)
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)
        self._done()

    def _done(self) -> None:
        with self._lock:
            self._num_running -= 1
            is_last = not self._num_running
        if is_last:
            self._connection.close()
            self._forget(self._number)


def account_of(peer: tuple[str, int], here: tuple[str, int]) -> int | None:
    """Return the user id of the process at the other end of a loopback connection.

    None if the kernel knows no such connection. Source: proc_net_tcp.rst of the kernel's documentation: addresses as
    hexadecimal words of this machine's byte order, the state, and the user id as the eighth field.
    """
    wanted = (_shown(peer), _shown(here), _ESTABLISHED)
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]:
            fields = line.split()
            if tuple(fields[1:4]) == wanted:
                return int(fields[7])
    return None


def _shown(address: tuple[str, int]) -> str:
    word = int.from_bytes(socket.inet_aton(address[0]), "little")
    return f"{word:08X}:{address[1]:04X}"
