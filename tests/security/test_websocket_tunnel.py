"""WebSocket tunnels to TCP ports of tasks: fragments, close frames, floods.

RFC 6455: sections 5.1 (masks), 5.2 (frames), 5.4 (fragments), 5.5 (control frames), 7.4 (codes), 8.1 (text).
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from det_here import DetHere
from door import connect, memory_mib, num_open_connections, read_all
from waiting import wait_for

from dstrial.master.login import USERNAME, new_token
from dstrial.testing.master import MasterForTest, master_for_test

pytestmark = pytest.mark.process

DEADLINE_S = 90.0
BINARY, TEXT, CONTINUATION, CLOSE, PING, PONG = 2, 1, 0, 8, 9, 10
FINAL = 0x80
MASK = b"\x0f\x1e\x2d\x3c"
MIB = 2**20

# Three services: an echo, an endless sender that writes its byte count to a file, and a service that never reads.
SERVICES = """
import contextlib, pathlib, socket, sys, threading

def listen(port, serve):
    listener = socket.create_server(("127.0.0.1", port))
    def run():
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=guarded, args=(serve, connection), daemon=True).start()
    threading.Thread(target=run).start()

def guarded(serve, connection):
    with contextlib.suppress(OSError), connection:
        serve(connection)

def echo(connection):
    while data := connection.recv(65536):
        connection.sendall(data)

def flood(connection):
    sent = 0
    while True:
        sent += connection.send(bytes(65536))
        pathlib.Path(sys.argv[4]).write_text(str(sent))

def never_read(connection):
    threading.Event().wait()

for port, serve in zip(map(int, sys.argv[1:4]), (echo, flood, never_read)):
    listen(port, serve)
"""


class Tunnels:
    """Opens WebSockets to the services of one task.

    Attributes:
        sent_path: file with the number of bytes that the endless sender has sent.
    """

    def __init__(self, master: MasterForTest, home: Path) -> None:
        self.master = master
        self.sent_path = home / "sent"
        self._token = new_token(master.record)
        with contextlib.ExitStack() as held:
            listeners = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
            self.echo, self.flood, self.never_read = (one.getsockname()[1] for one in listeners)
        context = home / "context"
        context.mkdir()
        (context / "services.py").write_text(SERVICES)
        ports = [{"proxy_port": port, "proxy_tcp": True} for port in (self.echo, self.flood, self.never_read)]
        self.det = DetHere(master.address, USERNAME, self._token, home)
        words = (
            sys.executable,
            "services.py",
            *map(str, (self.echo, self.flood, self.never_read, self.sent_path)),
        )
        options = ("--config=resources.slots=0", f"--config=environment.proxy_ports={json.dumps(ports)}")
        self.task_id = self.det.ok(
            "command", "run", "--detach", *options, "--context", str(context), *words
        ).split()[-1]
        for port in (self.echo, self.flood, self.never_read):
            wait_for(lambda port=port: listens(port), f"port {port}", deadline_s=DEADLINE_S)  # type: ignore[misc]

    def open(self, port: int) -> socket.socket:
        """Connect to a service and complete the WebSocket handshake."""
        connection = connect(self.master.record.port, DEADLINE_S)
        connection.sendall(
            f"GET /proxy/{self.task_id}:{port}/ HTTP/1.1\r\nHost: localhost:{self.master.record.port}\r\n"
            f"Authorization: Bearer {self._token}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n".encode()
        )
        head = bytearray()
        while not head.endswith(b"\r\n\r\n"):
            head += connection.recv(1)
        # The key and its answer are the example of RFC 6455, section 1.3.
        assert bytes(head) == (
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n"
        )
        return connection


def listens(port: int) -> bool:
    with contextlib.suppress(OSError), connect(port, 1):
        return True
    return False


def frame(first: int, payload: bytes = b"", *, size: int | None = None) -> bytes:
    """Return a masked client frame; ``size`` overrides the length in its header."""
    size = len(payload) if size is None else size
    if size < 126:
        head = struct.pack("!BB", first, 0x80 | size)
    elif size < 2**16:
        head = struct.pack("!BBH", first, 0xFE, size)
    else:
        head = struct.pack("!BBQ", first, 0xFF, size)
    repeated = (MASK * (len(payload) // 4 + 1))[: len(payload)]
    masked = int.from_bytes(payload, "big") ^ int.from_bytes(repeated, "big")
    return head + MASK + masked.to_bytes(len(payload), "big")


def close_frame(code: int) -> bytes:
    """Return the master's close frame with a status code."""
    return b"\x88\x02" + code.to_bytes(2, "big")


@pytest.fixture(scope="module")
def tunnels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tunnels]:
    home = tmp_path_factory.mktemp("tunnels")
    with master_for_test(home, num_slots=1) as master:
        yield Tunnels(master, home)
        log = master.state.log_path.read_text()
        assert "Traceback" not in log, log[-6000:]


def test_fragmented_message_with_ping_arrives_whole(tunnels: Tunnels) -> None:
    data = (
        frame(BINARY, b"ab")
        + frame(FINAL | PING, b"are you there")
        + frame(CONTINUATION, b"cd" * 100)
        + frame(FINAL | CONTINUATION, b"e" * 70_000)
        + frame(FINAL | TEXT, "grün €".encode())
        + frame(FINAL | PONG)
    )
    expected = b"ab" + b"cd" * 100 + b"e" * 70_000 + "grün €".encode()
    for size in (1, 7, len(data)):
        with tunnels.open(tunnels.echo) as connection:
            pieces = range(0, 400, size) if size < 400 else (0,)
            for start in pieces:
                connection.sendall(data[start : min(start + size, 400) if size < 400 else len(data)])
            if size < 400:
                connection.sendall(data[400:])
            opcodes, content = read_frames(connection, len(expected))
        assert content == expected
        assert opcodes.count(PONG) == 1


def read_frames(connection: socket.socket, num_bytes: int) -> tuple[list[int], bytes]:
    """Read ``num_bytes`` of data; return all frames' opcodes and the data."""
    stream = connection.makefile("rb")
    opcodes, content = [], b""
    while len(content) < num_bytes:
        first, size = stream.read(2)
        assert first & FINAL
        if size >= 126:
            size = int.from_bytes(stream.read(2 if size == 126 else 8), "big")
        payload = stream.read(size)
        opcodes.append(first & 0x0F)
        if first & 0x0F == BINARY:
            content += payload
        else:
            assert (first & 0x0F, payload) == (PONG, b"are you there")
    return opcodes, content


@pytest.mark.parametrize("payload", [b"", b"\x03\xe8", b"\x03\xe9going away", b"\x0f\xa0mine"])
def test_close_is_answered_once_ignoring_later_frames(tunnels: Tunnels, payload: bytes) -> None:
    with tunnels.open(tunnels.echo) as connection:
        connection.sendall(
            frame(FINAL | CLOSE, payload) + frame(FINAL | BINARY, b"late") + frame(FINAL | CLOSE)
        )

        assert read_all(connection) == close_frame(1000)


def test_non_reading_client_applies_backpressure(tunnels: Tunnels) -> None:
    with tunnels.open(tunnels.flood):
        before = memory_mib(tunnels.master.record.pid)
        sent = plateau(lambda: int(tunnels.sent_path.read_text() or 0) if tunnels.sent_path.exists() else 0)
        grown = memory_mib(tunnels.master.record.pid) - before

    assert 0 < sent < 64 * MIB
    assert grown < 32


def test_non_reading_service_applies_backpressure(tunnels: Tunnels) -> None:
    with tunnels.open(tunnels.never_read) as connection:
        before = memory_mib(tunnels.master.record.pid)
        connection.setblocking(False)
        data, sent = memoryview(frame(FINAL | BINARY, bytes(MIB)) * 64), 0

        def send() -> int:
            nonlocal sent
            with contextlib.suppress(BlockingIOError):
                while sent < len(data):
                    sent += connection.send(data[sent : sent + 65536])
            return sent

        assert plateau(send) < len(data)
        assert memory_mib(tunnels.master.record.pid) - before < 32


def plateau(value: Callable[[], int]) -> int:
    """Wait until a value has not changed for 3 s; return it."""
    give_up_at_s = time.monotonic() + DEADLINE_S
    last, since_s = -1, time.monotonic()
    while time.monotonic() < give_up_at_s:
        now = value()
        if now != last:
            last, since_s = now, time.monotonic()
        elif now > 0 and time.monotonic() - since_s > 3:
            return last
        time.sleep(0.05)
    raise AssertionError(f"still changes after {DEADLINE_S:g} s: {last}")


def test_task_end_closes_its_tunnel_connections(tunnels: Tunnels) -> None:
    master = tunnels.master.record

    tunnels.det.ok("command", "kill", tunnels.task_id)

    wait_for(
        lambda: num_open_connections(master.pid, master.port) == 0,
        "tunnel connections to close",
        deadline_s=DEADLINE_S,
    )
