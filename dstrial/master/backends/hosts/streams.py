"""Tunnel trials' TCP connections to their master through the agent's connection.

Each connection is a numbered stream with a socket at both ends. Bytes read from a socket are sent in frames with the stream's
number. The agent listens on the loopback address of its host only.
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

_CHUNK_BYTES = 1 << 16  # size of one read of a socket
_WAITING_CHUNKS = 1024  # limit of chunks that a stream's socket has not accepted; then the stream is closed
_ESTABLISHED = "01"  # state of a connection, in hexadecimal (linux net/tcp_states.h)


class Streams:
    """One end of the tunnel, with a socket per stream. Thread-safe.

    ``send`` is called with each frame for the other end; the call may block.
    """

    def __init__(self, send: Callable[[Mapping[str, Any]], None]) -> None:
        self._send = send
        self._lock = threading.Lock()
        # Socket, and queue of data to write to it, by stream number; None in the queue ends the stream.
        self._open: dict[int, tuple[socket.socket, queue.Queue[bytes | None]]] = {}

    def add(self, number: int, connection: socket.socket) -> None:
        """Tunnel a socket as stream ``number``; close the socket when the stream ends."""
        arrived: queue.Queue[bytes | None] = queue.Queue(_WAITING_CHUNKS)
        with self._lock:
            self._open[number] = (connection, arrived)
        reader = threading.Thread(target=self._read, args=(number, connection), daemon=True)
        reader.start()
        threading.Thread(target=self._write, args=(number, connection, arrived, reader), daemon=True).start()

    def handle(self, frame: Mapping[str, Any]) -> None:
        """Process a frame from the other end without blocking: queue the frame's data.

        If the queue is full, close the stream.
        """
        with self._lock:
            connection, arrived = self._open.get(int(frame["stream"]), (None, None))
        if connection is None or arrived is None:
            if not frame.get("end"):
                self._send({"stream": frame["stream"], "end": True})
            return
        try:
            arrived.put_nowait(None if frame.get("end") else base64.b64decode(frame["data"]))
        except queue.Full:  # the socket's peer does not read
            _abandon(connection, arrived)

    def close(self) -> None:
        """Close all streams, because the tunnel has ended."""
        with self._lock:
            found = list(self._open.values())
        for connection, arrived in found:
            _abandon(connection, arrived)

    def _read(self, number: int, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := connection.recv(_CHUNK_BYTES):
                self._send({"stream": number, "data": base64.b64encode(data).decode()})
        self._send({"stream": number, "end": True})

    def _write(
        self,
        number: int,
        connection: socket.socket,
        arrived: queue.Queue[bytes | None],
        reader: threading.Thread,
    ) -> None:
        with contextlib.suppress(OSError):
            while (data := arrived.get()) is not None:
                connection.sendall(data)
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_WR)
        reader.join()
        connection.close()
        with self._lock:
            self._open.pop(number, None)


def _abandon(connection: socket.socket, arrived: queue.Queue[bytes | None]) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    with contextlib.suppress(queue.Full):  # if full, the writer thread fails at its next write
        arrived.put_nowait(None)


def account_of(peer: tuple[str, int], here: tuple[str, int]) -> int | None:
    """Return the user id of the process at the other end of a loopback connection.

    ``peer`` and ``here`` are the (IPv4 address, port) of the other end and of this end. None if the kernel lists no such
    connection. Source: Linux kernel documentation, proc_net_tcp.rst (addresses are hexadecimal words in this machine's byte
    order).
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
