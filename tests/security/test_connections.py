"""Attacks without a token: endless requests, silence and many connections."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from door import (
    connect,
    is_open,
    many_connections,
    memory_mib,
    num_open_connections,
    read_all,
    request,
    send_until_refused,
    status_of,
)
from waiting import wait_for

from dstrial.master.login import session
from dstrial.master.state_directory import MasterRecord, StateDirectory
from dstrial.testing.master import MasterForTest

pytestmark = pytest.mark.process

MIB = 2**20
_CHUNKED = request("POST", "/api/v1/auth/login", "Transfer-Encoding: chunked")

ENDLESS = {
    "a header's value": (b"GET /info HTTP/1.1\r\nHost: localhost\r\nX: ", b"x" * 65536),
    "a header's name": (b"GET /info HTTP/1.1\r\nHost: localhost\r\n", b"x" * 65536),
    "headers": (b"GET /info HTTP/1.1\r\nHost: localhost\r\n", b"x: y\r\n" * 10000),
    "a path": (b"GET /", b"x" * 65536),
    "empty lines": (b"", b"\r\n" * 32768),
    "the second request's header": (request() + b"GET /info HTTP/1.1\r\nX: ", b"x" * 65536),
    "the trailer of a chunked body": (_CHUNKED + b"2\r\n{}\r\n0\r\n", b"x: y\r\n" * 10000),
    "the extension of a chunk": (_CHUNKED + b"2;x=", b"x" * 65536),
    "what follows an upgrade": (request("GET", "/info", "Connection: upgrade", "Upgrade: x"), b"x" * 65536),
}


@pytest.mark.parametrize("what", ENDLESS)
def test_endless_request_is_cut_off_without_memory_growth(shared_master: MasterForTest, what: str) -> None:
    head, filling = ENDLESS[what]
    pid = shared_master.record.pid
    before_mib = memory_mib(pid)
    with connect(shared_master.record.port) as connection:
        num_sent = send_until_refused(connection, head, filling, 190 * MIB)
        grown_mib = memory_mib(pid) - before_mib
    # Kernel buffers hold some bytes, and the master discards some while it sends the refusal.
    assert num_sent < 30 * MIB, (
        f"{num_sent / MIB:.0f} MiB were taken, and the master grew by {grown_mib:.0f} MiB"
    )
    assert grown_mib < 32, f"the master grew by {grown_mib:.0f} MiB"


def test_pipelined_requests_with_unread_answers_are_bounded(shared_master: MasterForTest) -> None:
    pid = shared_master.record.pid
    before_mib = memory_mib(pid)
    with connect(shared_master.record.port) as connection:
        num_sent = send_until_refused(connection, b"", request() * 2000, 64 * MIB)
        grown_mib = memory_mib(pid) - before_mib
    assert grown_mib < 32, f"{num_sent / MIB:.0f} MiB were sent, and the master grew by {grown_mib:.0f} MiB"


def test_pipelined_requests_are_answered_in_order(shared_master: MasterForTest) -> None:
    with connect(shared_master.record.port) as connection:
        connection.sendall(
            request() + request("GET", "/api/v1/me") + request("GET", "/info", "Connection: close")
        )
        answers = read_all(connection)
    assert [part[:3] for part in answers.split(b"HTTP/1.1 ")[1:]] == [b"200", b"401", b"200"]


SLOW = {
    "nothing": (b"", b""),
    "half a head": (b"GET /info HTTP/1.1\r\nHost: localhost\r\nX: ", b"x"),
    "half a second head": (request() + b"GET /info HTTP/1.1\r\n", b"x"),
    "a body that never comes": (request("POST", "/api/v1/auth/login", "Content-Length: 2"), b""),
    "a body that drips": (request("POST", "/api/v1/auth/login", "Content-Length: 60000"), b" "),
    "a body that was refused": (request("POST", "/api/v1/experiments", "Content-Length: 99999999"), b" "),
    "what follows an upgrade": (request("GET", "/info", "Connection: upgrade", "Upgrade: x"), b"x"),
    "answers that nobody reads": (request("GET", "/page/assets/vendor/uplot.js") * 200, b""),
}


def test_only_unauthenticated_clients_have_a_deadline(shared_master: MasterForTest) -> None:
    """All clients connect at once, because every deadline takes 30 s."""
    pid, port = shared_master.record.pid, shared_master.record.port
    still_open: list[str] = []

    def hold(what: str) -> None:
        head, drop = SLOW[what]
        with connect(port) as connection:
            connection.sendall(head)
            ended_at_s = time.monotonic() + 60
            while is_open(pid, port, connection.getsockname()[1]):
                if time.monotonic() > ended_at_s:
                    still_open.append(what)
                    break
                with contextlib.suppress(OSError):
                    connection.send(drop)
                time.sleep(1.0)

    threads = [threading.Thread(target=hold, args=(what,)) for what in SLOW]
    for thread in threads:
        thread.start()
    auth = f"Authorization: Bearer {shared_master.client().token}"
    with connect(port) as connection:
        connection.sendall(
            request("POST", "/api/v1/workspaces", auth, "Content-Length: 2", "Connection: close")
        )
        for thread in threads:
            thread.join()
        connection.sendall(b"{}")
        assert b"name" in read_all(connection)
    assert not still_open


@contextlib.contextmanager
def few_files(directory: Path, num_files: int) -> Iterator[tuple[MasterRecord, dict[str, str]]]:
    """Run a master that may open at most ``num_files`` files."""
    state = StateDirectory(directory / "state")
    env = {**os.environ, "DSTRIAL_STATE_DIR": str(state.path), "XDG_CONFIG_HOME": str(directory / "config")}
    command = [sys.executable, "-m", "dstrial.cli"]
    limited = ["prlimit", f"--nofile={num_files}:{num_files}", *command, "up", "--port", "0", "--slots", "1"]
    subprocess.run(limited, env=env, check=True, capture_output=True, timeout=120)
    record = state.running()
    assert record is not None
    try:
        yield record, env
    finally:
        subprocess.run([*command, "down", "--now"], env=env, check=True, capture_output=True, timeout=120)


def test_connection_limit_evicts_oldest_idle_connection(tmp_path: Path) -> None:
    with few_files(tmp_path, 200) as (record, _env):
        port = record.port
        client = session(record)
        auth = f"Authorization: Bearer {client.token}"
        config = {"entrypoint": ["sleep", "600"], "description": "waits"}
        task = client.post("/api/v1/commands", {"config": config})["command"]["id"]
        with connect(port) as streaming, connect(port) as used:
            streaming.sendall(request("GET", f"/api/v1/tasks/{task}/logs?follow=true", auth))
            assert streaming.recv(12) == b"HTTP/1.1 200"
            with many_connections(port, 100) as idle:
                with contextlib.suppress(ConnectionResetError):  # closed as idle, as with b""
                    used.sendall(request("GET", "/api/v1/me", auth))
                    assert used.recv(12) in (b"HTTP/1.1 200", b"")
                wait_for(lambda: num_open_connections(record.pid, port) <= 36)
                assert read_all(idle[0]) == b""
                idle[-1].sendall(request("GET", "/info", "Connection: close"))
                assert status_of(read_all(idle[-1])) == 200
            streaming.settimeout(0.5)
            with contextlib.suppress(TimeoutError):
                while chunk := streaming.recv(65536):
                    assert chunk
                pytest.fail("a stream was dropped for idle connections")
