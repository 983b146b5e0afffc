"""Attacks by other local accounts on the port and on the owner's socket."""

from __future__ import annotations

import socket
import stat
import subprocess
from pathlib import Path

import pytest
from door import (
    OTHER_ACCOUNT,
    PYTHON,
    ask_as_other_account,
    needs_root,
    num_open_connections,
    read_all,
    request,
    status_of,
)

from dstrial.errors import RequestError
from dstrial.master.client import Client
from dstrial.master.login import new_token
from dstrial.testing.master import MasterForTest

pytestmark = pytest.mark.process


@needs_root
def test_other_account_without_token_gets_401(shared_master: MasterForTest) -> None:
    address = ["127.0.0.1", shared_master.record.port]
    for path in ("/api/v1/me", "/api/v1/experiments", "/proxy/x/", "/page/tasks"):
        assert status_of(ask_as_other_account(address, request("GET", path, "Connection: close"))) == 401, (
            path
        )
    upgrade = request("GET", "/proxy/x/", "Connection: Upgrade", "Upgrade: websocket")
    assert status_of(ask_as_other_account(address, upgrade)) == 401
    for password in ("", "determined"):
        body = f'{{"username": "determined", "password": "{password}"}}'.encode()
        length = f"Content-Length: {len(body)}"
        login = request("POST", "/api/v1/auth/login", length, "Connection: close", body=body)
        assert status_of(ask_as_other_account(address, login)) == 401


@needs_root
def test_owner_socket_refuses_other_accounts(shared_master: MasterForTest) -> None:
    path = Path(shared_master.record.socket)
    assert path == shared_master.state.path / "master.sock"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    asked = request("POST", "/owner/login", "Content-Length: 0")
    assert b"PermissionError" in ask_as_other_account(str(path), asked, socket.AF_UNIX)
    # The mode of the socket protects it even if all directories above are open.
    opened = [directory for directory in path.parents if not directory.stat().st_mode & 0o001]
    modes = {one: stat.S_IMODE(one.stat().st_mode) for one in opened}
    try:
        for one in modes:
            one.chmod(0o777)
        assert b"PermissionError" in ask_as_other_account(str(path), asked, socket.AF_UNIX)
    finally:
        for one, mode in modes.items():
            one.chmod(mode)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]"])
def test_owner_login_is_refused_on_tcp_port(shared_master: MasterForTest, host: str) -> None:
    body = b'{"username": "admin"}'
    for path in ("/owner/login", "/owner/login/", "//owner/login", "/api/v1/../../owner/login"):
        with socket.create_connection(("127.0.0.1", shared_master.record.port), timeout=20) as connection:
            connection.sendall(
                f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n"
                f"Forwarded: for=unix\r\nX-Forwarded-For: unix\r\nConnection: close\r\n\r\n".encode()
                + body
            )
            answer = read_all(connection)
        assert status_of(answer) in (403, 404, 501), answer
        assert b"token" not in answer.partition(b"\r\n\r\n")[2]
    with pytest.raises(RequestError, match="owner of the state directory only"):
        Client(shared_master.address, shared_master.client("admin").token).post(
            "/owner/login", {"username": "admin"}
        )


def test_owner_socket_refuses_foreign_host_header(shared_master: MasterForTest) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(20)
        connection.connect(shared_master.record.socket)
        connection.sendall(
            b"POST /owner/login HTTP/1.1\r\nHost: evil.example\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        )
        assert status_of(read_all(connection)) == 403


_FLOOD = """
import socket, sys
held = []
for _ in range(1200):
    held.append(socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=20))
print("held", flush=True)
sys.stdin.read()
"""


@needs_root
def test_idle_connection_flood_does_not_lock_out_owner(shared_master: MasterForTest) -> None:
    port = shared_master.record.port
    words = ["setpriv", f"--reuid={OTHER_ACCOUNT}", "--clear-groups", PYTHON, "-I", "-c", _FLOOD]
    with subprocess.Popen(
        [*words, str(port)], cwd="/", stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as flooding:
        assert flooding.stdout is not None
        assert flooding.stdin is not None
        assert flooding.stdout.readline() == b"held\n"
        assert num_open_connections(shared_master.record.pid, port) <= 1000
        for _ in range(20):
            assert shared_master.client().get("/api/v1/me")["user"]["username"] == "determined"
        assert new_token(shared_master.record)
        flooding.stdin.close()
        assert flooding.wait(20) == 0
