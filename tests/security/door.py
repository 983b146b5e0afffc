"""Helpers for attacks on the master: raw connections, memory, other accounts."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

OTHER_ACCOUNT = 65534
"""A user id that is neither root's nor that of the tests."""

PYTHON = "/usr/bin/python3" if Path("/usr/bin/python3").exists() else sys.executable
"""The system's interpreter: other accounts may lack access to that of the tests."""

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="Requires: [root], to become another account")


def connect(port: int, timeout_s: float = 10.0) -> socket.socket:
    """Open a connection to a master."""
    return socket.create_connection(("127.0.0.1", port), timeout=timeout_s)


def request(method: str = "GET", path: str = "/info", *headers: str, body: bytes = b"") -> bytes:
    """Return the bytes of an HTTP request."""
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: localhost", *headers, "", ""]).encode() + body


def read_all(connection: socket.socket, deadline_s: float = 60.0) -> bytes:
    """Read until the peer closes or resets the connection; fail at the deadline."""
    content = b""
    give_up_at_s = time.monotonic() + deadline_s
    with contextlib.suppress(ConnectionError):
        while True:
            connection.settimeout(max(0.01, give_up_at_s - time.monotonic()))
            try:
                chunk = connection.recv(65536)
            except TimeoutError as error:
                text = f"the connection is still open after {deadline_s:g} s; it has said {content[:200]!r}"
                raise AssertionError(text) from error
            if not chunk:
                break
            content += chunk
    return content


def status_of(answer: bytes) -> int:
    """Return the status code of an HTTP response, or 0 if it has none."""
    found = re.match(rb"HTTP/1\.1 (\d{3}) ", answer)
    return int(found[1]) if found else 0


def send_until_refused(connection: socket.socket, head: bytes, filling: bytes, num_bytes: int) -> int:
    """Send ``head``, then repeat ``filling``; return how many filling bytes were sent."""
    connection.settimeout(10.0)
    num_sent = 0
    with contextlib.suppress(ConnectionError, TimeoutError):
        connection.sendall(head)
        while num_sent < num_bytes:
            connection.sendall(filling)
            num_sent += len(filling)
    return num_sent


def memory_mib(pid: int, name: str = "VmRSS") -> float:
    """Return the memory of a process in MiB; ``VmHWM`` is its peak."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def is_open(pid: int, port: int, client_port: int) -> bool:
    return client_port in _client_ports(pid, port)


def num_open_connections(pid: int, port: int) -> int:
    """Return the number of connections to a port that a process holds open."""
    return len(_client_ports(pid, port))


def _client_ports(pid: int, port: int) -> list[int]:
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes |= set(re.findall(r"socket:\[(\d+)\]", str(link.readlink())))
    rows = (line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:])
    return [
        int(row[2].partition(":")[2], 16)
        for row in rows
        if row[1].endswith(f":{port:04X}") and row[3] != "0A" and row[9] in inodes
    ]


_OTHER = """
import os, sys
os.setgroups([]); os.setgid({account}); os.setuid({account})
import json, socket
connection = socket.socket(*json.loads(sys.argv[1]))
address = json.loads(sys.argv[2])
connection.settimeout(20)
answer = b""
try:
    connection.connect(tuple(address) if isinstance(address, list) else address)
    connection.sendall(sys.argv[3].encode())
    while chunk := connection.recv(65536):
        answer += chunk
except OSError as error:
    answer = answer or f"{{type(error).__name__}} {{error}}".encode()
sys.stdout.buffer.write(answer)
"""


def ask_as_other_account(
    address: object, sent: bytes, family: int = socket.AF_INET, account: int = OTHER_ACCOUNT
) -> bytes:
    """Send a request as another account; return the response or the error's name."""
    words = [json.dumps([int(family), int(socket.SOCK_STREAM)]), json.dumps(address), sent.decode()]
    ended = subprocess.run(
        [PYTHON, "-I", "-S", "-c", _OTHER.format(account=account), *words],
        capture_output=True,
        timeout=60,
        cwd="/",
    )
    assert ended.returncode == 0, ended.stderr.decode()
    return ended.stdout


@contextlib.contextmanager
def many_connections(port: int, count: int) -> Iterator[list[socket.socket]]:
    """Hold up to ``count`` silent connections open."""
    with contextlib.ExitStack() as stack:
        held = []
        for _ in range(count):
            with contextlib.suppress(OSError):
                held.append(stack.enter_context(connect(port, 5.0)))
        yield held
