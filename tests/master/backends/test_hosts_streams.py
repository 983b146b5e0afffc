"""TCP streams multiplexed over frames, and the owner of a local connection."""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from dstrial.master.backends.hosts.streams import Streams, account_of

pytestmark = pytest.mark.process
_SOON_S = 10.0


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as one:
        yield one


class _Tunnel:
    """Two ``Streams`` that exchange frames in order, as over one connection."""

    def __init__(self) -> None:
        self.frames: queue.SimpleQueue[tuple[Streams, Mapping[str, Any]] | None] = queue.SimpleQueue()
        self.here = Streams(lambda frame: self.frames.put((self.there, frame)))
        self.there = Streams(lambda frame: self.frames.put((self.here, frame)))
        self._thread = threading.Thread(target=self._carry)
        self._thread.start()

    def _carry(self) -> None:
        while (found := self.frames.get()) is not None:
            end, frame = found
            end.handle(frame)

    def close(self) -> None:
        self.frames.put(None)
        self._thread.join()


@pytest.fixture
def tunnel() -> Iterator[_Tunnel]:
    one = _Tunnel()
    yield one
    one.close()


def _pair(listener: socket.socket) -> tuple[socket.socket, socket.socket]:
    client = socket.create_connection(listener.getsockname())
    client.settimeout(_SOON_S)
    return client, listener.accept()[0]


def _read_all(connection: socket.socket) -> bytes:
    data = b""
    while piece := connection.recv(1 << 16):
        data += piece
    return data


def test_stream_keeps_order_and_supports_half_close(listener: socket.socket, tunnel: _Tunnel) -> None:
    (client, inner), (outer, server) = _pair(listener), _pair(listener)
    server.settimeout(_SOON_S)
    tunnel.there.add(1, outer)
    tunnel.here.add(1, inner)
    sent = os.urandom(3_000_000)

    threading.Thread(target=lambda: (client.sendall(sent), client.shutdown(socket.SHUT_WR))).start()
    assert _read_all(server) == sent
    server.sendall(b"an answer after the end of the question")
    server.close()
    assert _read_all(client) == b"an answer after the end of the question"
    client.close()


def test_tunnel_close_closes_its_connections(listener: socket.socket, tunnel: _Tunnel) -> None:
    client, inner = _pair(listener)
    tunnel.here.add(1, inner)

    tunnel.here.close()

    assert client.recv(1) == b""
    client.close()


def test_frame_of_unknown_stream_is_answered_with_end() -> None:
    said: list[Mapping[str, Any]] = []
    streams = Streams(said.append)

    streams.handle({"stream": 7, "data": "AA=="})
    streams.handle({"stream": 7, "end": True})

    assert said == [{"stream": 7, "end": True}]


def test_account_of_returns_uid_of_connection_owner(listener: socket.socket) -> None:
    client, server = _pair(listener)

    assert account_of(client.getsockname(), server.getsockname()) == os.geteuid()
    assert account_of(("127.0.0.1", 1), server.getsockname()) is None
    client.close()
    server.close()
